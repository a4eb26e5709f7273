// Behavior of a page of figures and tables: themes, lazy drawing, rows that unfold.
// Text from a trace is only in the JSON of the figures; plotly.js gets it escaped (figure_text in text.py).
(() => {
  "use strict";
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover", plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const redraws = [];

  const storedTheme = () => { try { return localStorage.getItem("memtrace-theme"); } catch { return null; } };
  const storeTheme = (name) => { try { localStorage.setItem("memtrace-theme", name); } catch { /* browsers may refuse storage for file:// */ } };
  let theme = storedTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  function applyTheme() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.title = `Switch to the ${theme === "dark" ? "light" : "dark"} theme`;
    for (const redraw of redraws) redraw();
  }

  let plotly = null; // promise of plotly.js, which is unpacked for the first figure
  function loadPlotly() {
    plotly ??= (async () => {
      const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (character) => character.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
      const script = document.createElement("script");
      script.textContent = await new Response(stream).text();
      document.head.append(script);
      return window.Plotly;
    })();
    return plotly;
  }

  async function draw(figure) {
    const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
    delete layout.meta;
    layout.margin = { l: 60, r: 20, t: 30, b: 45, ...layout.margin };
    layout.height = Number(figure.dataset.height);
    const inThemeColors = () => ({ ...layout, template: themes[theme].template });
    const Plotly = await loadPlotly();
    await Plotly.newPlot(figure, data, inThemeColors(), config);
    redraws.push(() => Plotly.react(figure, data, inThemeColors(), config));
    figure.dataset.drawn = "true";
  }

  const showing = new Map(); // figure -> promise that it is drawn
  function show(figure) {
    if (!showing.has(figure)) showing.set(figure, draw(figure));
    return showing.get(figure);
  }

  const figures = [...document.querySelectorAll(".figure")];
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); show(entry.target); }
  }, { rootMargin: "600px" });

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[aria-controls]");
    if (!button) return;
    const row = document.getElementById(button.getAttribute("aria-controls"));
    row.hidden = !row.hidden;
    button.setAttribute("aria-expanded", String(!row.hidden));
  });
  document.getElementById("theme").addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    storeTheme(theme);
    applyTheme();
  });

  // Paper is light.
  let themeOnScreen = theme;
  addEventListener("beforeprint", () => { themeOnScreen = theme; theme = "light"; applyTheme(); });
  addEventListener("afterprint", () => { theme = themeOnScreen; applyTheme(); });
  document.getElementById("print").addEventListener("click", async () => {
    await Promise.all(figures.map(show));
    print();
  });
  applyTheme();
  for (const figure of figures) observer.observe(figure);
})();
