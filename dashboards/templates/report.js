// Behavior of the page: themes, views, drawing of what comes into sight, rows that unfold.
const themes = JSON.parse(document.getElementById("themes").textContent);
const config = {
  responsive: true, displaylogo: false, displayModeBar: "hover", plotlyServerURL: "",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};
const store = createStore(), source = createSource();
const served = document.getElementById("served") ? createServed(source, store) : null;
const widgets = { tracks: mountTracks, explorer: mountExplorer };
const drawn = new Map(); // element of a figure or widget -> function that draws it again

const storedTheme = () => { try { return localStorage.getItem("memtrace-theme"); } catch { return null; } };
const storeTheme = (name) => { try { localStorage.setItem("memtrace-theme", name); } catch { /* browsers may refuse storage for file:// */ } };
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = storedTheme() ?? (system.matches ? "dark" : "light");

function applyTheme() {
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = theme === "dark" ? "Light" : "Dark";
  button.title = `Switch to the ${theme === "dark" ? "light" : "dark"} theme`;
  for (const redraw of drawn.values()) redraw();
}

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

async function drawFigure(figure) {
  const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
  const nsPerUnit = layout.meta?.ns_per_unit;
  delete layout.meta;
  layout.margin ??= { l: 60, r: 20, t: 30, b: 45 };
  layout.height = Number(figure.dataset.height);
  const inThemeColors = () => {
    for (const trace of data) if (trace.meta?.ink && trace.line) trace.line.color = themes[theme].colors.ink;
    return { ...layout, template: themes[theme].template };
  };
  const Plotly = await loadPlotly();
  await Plotly.newPlot(figure, data, inThemeColors(), config);
  const followRange = () => { // figures over time show the range of the tracks
    const { from, to } = store.get();
    const range = from === null ? { "xaxis.autorange": true } : { "xaxis.range": [from, to].map((us) => (us * 1000) / nsPerUnit) };
    Plotly.relayout(figure, range);
  };
  if (nsPerUnit) {
    store.subscribe((state, changed) => { if (changed.includes("from") || changed.includes("to")) followRange(); });
    if (store.get().from !== null) followRange();
  }
  return () => Plotly.react(figure, data, inThemeColors(), config);
}

async function drawWidget(root) {
  const { view } = root.closest(".view").dataset, mount = widgets[root.dataset.widget], colors = () => themes[theme].colors;
  if (served) return served.mount(root, view, mount, colors);
  return mount(root, await source.load(view), store, colors);
}

const showing = new Map(); // element -> promise that it is drawn
function show(element) {
  if (!showing.has(element)) showing.set(element, (async () => {
    drawn.set(element, await (element.dataset.widget ? drawWidget(element) : drawFigure(element)));
    element.dataset.drawn = "true";
  })());
  return showing.get(element);
}

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); show(entry.target); }
}, { rootMargin: "600px" });
const visibleElements = () => [...document.querySelectorAll(".figure, .widget")].filter((element) => !element.closest("[hidden]"));

function selectView() {
  const views = [...document.querySelectorAll(".view")];
  const current = views.find((view) => view.dataset.view === store.get().view) ?? views[0];
  for (const part of document.querySelectorAll(".view-head, .view")) part.hidden = part.dataset.view !== current?.dataset.view;
  const choice = document.getElementById("view");
  if (choice && current) choice.value = current.dataset.view;
  for (const element of visibleElements()) if (!showing.has(element)) observer.observe(element);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[aria-controls]");
  if (button) {
    const row = document.getElementById(button.getAttribute("aria-controls"));
    row.hidden = !row.hidden;
    button.setAttribute("aria-expanded", String(!row.hidden));
  }
  const link = event.target.closest?.("nav a");
  if (link) {
    event.preventDefault();
    store.set({ section: link.hash.slice(1) }, { push: true });
  }
});
const scrollToSection = () => document.getElementById(store.get().section ?? "")?.scrollIntoView();
document.getElementById("theme").addEventListener("click", () => {
  theme = theme === "dark" ? "light" : "dark";
  storeTheme(theme);
  applyTheme();
});
// Instants and ranges of one view mean nothing in another.
document.getElementById("view")?.addEventListener("change", (event) => store.set(
  { view: event.target.value, from: null, to: null, at: null, block: null, step: null, module: null, section: null }, { push: true }));
store.subscribe((state, changed) => {
  if (changed.includes("view")) selectView();
  if (changed.includes("section")) scrollToSection();
});

// Paper is light. Canvases and figures are drawn again at once; figures that were never drawn come too late for this.
let themeOnScreen = theme;
addEventListener("beforeprint", () => { themeOnScreen = theme; theme = "light"; applyTheme(); });
addEventListener("afterprint", () => { theme = themeOnScreen; applyTheme(); });
document.getElementById("print").addEventListener("click", async () => {
  await Promise.all(visibleElements().map(show));
  print();
});

// Draws, one after the other and only while neither the browser nor the reader is busy, what nobody has scrolled to yet: it is
// there when it comes into sight or is printed.
const QUIET_MS = 1500; // without input
let lastInput = -Infinity;
for (const kind of ["pointerdown", "pointermove", "wheel", "keydown"]) {
  addEventListener(kind, () => { lastInput = performance.now(); }, { passive: true, capture: true });
}
const whenIdle = globalThis.requestIdleCallback ?? ((act) => setTimeout(act, 200));
async function drawTheRest() {
  const next = visibleElements().find((element) => !showing.has(element));
  if (!next) return;
  const wait = lastInput + QUIET_MS - performance.now();
  if (wait <= 0) await show(next);
  setTimeout(() => whenIdle(drawTheRest), Math.max(wait, 0));
}
applyTheme();
selectView();
scrollToSection();
(visibleElements().length ? show(visibleElements()[0]) : Promise.resolve()).then(() => whenIdle(drawTheRest));
