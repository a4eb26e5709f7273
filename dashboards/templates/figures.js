// What every page does: themes, drawing of what comes into sight, printing, rows that unfold. Text from a trace is only in the
// JSON of the figures; plotly.js gets it escaped (figure_text of memtrace.dashboards.text).
const themes = JSON.parse(document.getElementById("themes").textContent);
const config = {
  responsive: true, displaylogo: false, displayModeBar: "hover", plotlyServerURL: "",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};
const storedTheme = () => { try { return localStorage.getItem("memtrace-theme"); } catch { return null; } };
const storeTheme = (name) => { try { localStorage.setItem("memtrace-theme", name); } catch { /* browsers may refuse storage for file:// */ } };
let theme = storedTheme() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const themeColors = () => themes[theme].colors;

let plotly = null; // promise of plotly.js, which is unpacked for the first figure that needs it
function loadPlotly() {
  plotly ??= (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    document.head.append(make("script", { textContent: await new Response(stream).text() }));
    return window.Plotly;
  })();
  return plotly;
}

// Draws a figure of plotly. Returns a function that draws it again, for another theme.
async function drawFigure(figure) {
  const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
  delete layout.meta;
  layout.margin = { l: 60, r: 20, t: 30, b: 45, ...layout.margin };
  layout.height = Number(figure.dataset.height);
  const inThemeColors = () => {
    for (const trace of data) if (trace.meta?.ink && trace.line) trace.line.color = themeColors().ink;
    return { ...layout, template: themes[theme].template };
  };
  const Plotly = await loadPlotly();
  await Plotly.newPlot(figure, data, inThemeColors(), config);
  return () => Plotly.react(figure, data, inThemeColors(), config);
}

// Starts a page; draw(element) draws a figure or widget and returns a promise of what draws it again. Returns a function
// that has the elements drawn that have become visible, when they come into sight or when nothing else is to be done.
function startPage(draw) {
  const drawn = new Map(); // element -> function that draws it again
  const showing = new Map(); // element -> promise that it is drawn
  function show(element) {
    if (!showing.has(element)) showing.set(element, (async () => {
      drawn.set(element, await draw(element));
      element.dataset.drawn = "true";
    })());
    return showing.get(element);
  }
  const visibleElements = () => [...document.querySelectorAll(".figure, .widget")].filter((element) => !element.closest("[hidden]"));
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); show(entry.target); }
  }, { rootMargin: "600px" });

  function applyTheme() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.title = `Switch to the ${theme === "dark" ? "light" : "dark"} theme`;
    for (const redraw of drawn.values()) redraw();
  }
  document.getElementById("theme").addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    storeTheme(theme);
    applyTheme();
  });
  // Paper is light. Canvases and figures are drawn again at once; figures that were never drawn come too late for this.
  let themeOnScreen = theme;
  addEventListener("beforeprint", () => { themeOnScreen = theme; theme = "light"; applyTheme(); });
  addEventListener("afterprint", () => { theme = themeOnScreen; applyTheme(); });
  document.getElementById("print").addEventListener("click", async () => {
    await Promise.all(visibleElements().map(show));
    print();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[aria-controls]");
    if (!button) return;
    const row = document.getElementById(button.getAttribute("aria-controls"));
    row.hidden = !row.hidden;
    button.setAttribute("aria-expanded", String(!row.hidden));
  });

  // Draws, one after the other and only while neither the browser nor the reader is busy, what nobody has scrolled to yet:
  // it is there when it comes into sight or is printed.
  const QUIET_MS = 1500; // without input
  let lastInput = -Infinity;
  for (const kind of ["pointerdown", "pointermove", "wheel", "keydown"]) {
    addEventListener(kind, () => { lastInput = performance.now(); }, { passive: true, capture: true });
  }
  const whenIdle = globalThis.requestIdleCallback ?? ((act) => setTimeout(act, 200));
  let isDrawing = false;
  async function drawTheRest() {
    const next = visibleElements().find((element) => !showing.has(element));
    isDrawing = Boolean(next);
    if (!next) return;
    const wait = lastInput + QUIET_MS - performance.now();
    if (wait <= 0) await show(next);
    setTimeout(() => whenIdle(drawTheRest), Math.max(wait, 0));
  }

  applyTheme();
  return () => {
    const waiting = visibleElements().filter((element) => !showing.has(element));
    for (const element of waiting) observer.observe(element);
    if (!isDrawing && waiting.length) show(waiting[0]).then(() => whenIdle(drawTheRest));
  };
}
