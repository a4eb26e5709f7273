// Behavior of a page of figures and tables: themes, lazy drawing, rows that unfold.
// Text from a trace is only in the JSON of the figures; plotly.js gets it escaped (figure_text in text.py).
(() => {
  "use strict";
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover", plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const drawn = new Set();

  const storedTheme = () => { try { return localStorage.getItem("memtrace-theme"); } catch { return null; } };
  const storeTheme = (name) => { try { localStorage.setItem("memtrace-theme", name); } catch { /* browsers may refuse storage for file:// */ } };
  let theme = storedTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  async function applyTheme() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.title = `Switch to the ${theme === "dark" ? "light" : "dark"} theme`;
    for (const figure of drawn) {
      await Plotly.react(figure, figure.data, { ...figure.layout, template: themes[theme].template }, config);
    }
  }

  async function draw(figure) {
    if (drawn.has(figure)) return;
    drawn.add(figure);
    const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
    delete layout.meta;
    layout.template = themes[theme].template;
    layout.margin = { l: 60, r: 20, t: 30, b: 45, ...layout.margin };
    layout.height = figure.clientHeight;
    await Plotly.newPlot(figure, data, layout, config);
    figure.dataset.drawn = "true";
  }

  const figures = [...document.querySelectorAll(".figure")];
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); draw(entry.target); }
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
  addEventListener("beforeprint", () => figures.forEach(draw));
  applyTheme();
  for (const figure of figures) observer.observe(figure);
})();
