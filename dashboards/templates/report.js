// Behavior of the page: themes, lazy drawing, selection of rank and device, rows that unfold.
// Numbers arrive as text, formatted by memtrace.units; only timeline.js formats bytes, for its hover texts.
// Text from a trace is only in the JSON of the figures, and enters the document only through textContent.
(() => {
  "use strict";
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover", plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const drawn = new Map(); // figure element -> { timeline: its controller, or null }
  const explorers = new Map(); // element of an explorer -> its controller; null: being made

  const storedTheme = () => { try { return localStorage.getItem("memtrace-theme"); } catch { return null; } };
  const storeTheme = (name) => { try { localStorage.setItem("memtrace-theme", name); } catch { /* browsers may refuse storage for file:// */ } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  let theme = storedTheme() ?? (system.matches ? "dark" : "light");

  function setInkColor(data) { // lines whose color follows the theme
    for (const trace of data) if (trace.meta?.ink && trace.line) trace.line.color = themes[theme].colors.ink;
    return data;
  }

  async function applyTheme() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.title = `Switch to the ${theme === "dark" ? "light" : "dark"} theme`;
    for (const [figure, state] of drawn) {
      await Plotly.react(figure, setInkColor(figure.data), { ...figure.layout, template: themes[theme].template }, config);
      state.timeline?.redraw();
    }
    for (const explorer of explorers.values()) explorer?.redraw();
  }

  async function draw(figure) {
    if (drawn.has(figure)) return;
    const state = { timeline: null };
    drawn.set(figure, state);
    const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
    const meta = layout.meta ?? {};
    delete layout.meta;
    layout.template = themes[theme].template;
    layout.margin ??= { l: 60, r: 20, t: 30, b: 45 };
    layout.height = Number(figure.dataset.height);
    await Plotly.newPlot(figure, setInkColor(data), layout, config);
    if (meta.kind === "timeline") {
      state.timeline = await memtraceTimeline(figure, meta, () => themes[theme].colors);
      state.timeline.onZoom((range) => {
        if (range !== undefined) zoomOthers(figure, range);
        explorerBeside(figure)?.showRange();
      });
      state.timeline.onClick((row) => explorerBeside(figure)?.showInstant(row));
      explorerBeside(figure)?.follow(state.timeline);
    } else if (meta.ns_per_unit) {
      figure.memtraceNsPerUnit = meta.ns_per_unit;
    }
    figure.dataset.drawn = "true";
  }

  // The explorer of the view of a figure, once it has been drawn.
  const explorerBeside = (figure) => explorers.get(figure.closest(".view").querySelector(".explorer"));

  async function explore(root) {
    if (explorers.has(root)) return;
    explorers.set(root, null);
    const data = JSON.parse(document.getElementById(root.dataset.explorer).textContent);
    const explorer = await memtraceExplorer(root, data, () => themes[theme].colors);
    explorers.set(root, explorer);
    const timeline = root.closest(".view").querySelector(".figure[data-drawn]");
    if (timeline && drawn.get(timeline)?.timeline) explorer.follow(drawn.get(timeline).timeline);
    root.dataset.drawn = "true";
  }

  function zoomOthers(timeline, range) { // range in nanoseconds; null: the whole recording
    for (const figure of timeline.closest(".view").querySelectorAll(".figure[data-drawn]")) {
      const unit = figure.memtraceNsPerUnit;
      if (!unit) continue;
      Plotly.relayout(figure, range ? { "xaxis.range": range.map((t) => t / unit) } : { "xaxis.autorange": true });
    }
  }

  const show = (element) => (element.classList.contains("explorer") ? explore(element) : draw(element));
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); show(entry.target); }
  }, { rootMargin: "600px" });

  const visibleFigures = () => [...document.querySelectorAll(".figure, .explorer")].filter((figure) => !figure.closest("[hidden]"));

  function selectView(id) {
    for (const view of document.querySelectorAll(".view")) view.hidden = view.id !== `view-${id}`;
    for (const figure of visibleFigures()) observer.observe(figure);
  }

  function toggleRow(button) {
    const row = document.getElementById(button.getAttribute("aria-controls"));
    row.hidden = !row.hidden;
    button.setAttribute("aria-expanded", String(!row.hidden));
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button[aria-controls]");
    if (button) toggleRow(button);
  });
  document.getElementById("theme").addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    storeTheme(theme);
    applyTheme();
  });
  document.getElementById("view")?.addEventListener("change", (event) => selectView(event.target.value));
  addEventListener("beforeprint", () => visibleFigures().forEach(show));
  applyTheme();
  for (const figure of visibleFigures()) observer.observe(figure);
})();
