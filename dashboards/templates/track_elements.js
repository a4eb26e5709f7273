// The elements around the tracks: tools, legend, ruler, marks and tooltip.

function makeElements(root, tracks, { data, store }) {
  const tools = make("div", { className: "tools" }), legend = make("div", { className: "legend" });
  const ruler = make("canvas", { className: "ruler" }), area = make("div", { className: "area", tabIndex: 0 });
  area.setAttribute("role", "application");
  area.setAttribute("aria-label", "Memory, steps and blocks over time. W and S zoom, A and D pan, P shows the peak, 0 shows everything.");
  const mark = (name) => make("div", { className: name, hidden: true });
  const cursor = mark("cursor"), instant = mark("instant"), brush = mark("brush"), tip = mark("tracktip");
  area.append(ruler, ...tracks.flatMap(([title, { canvas }]) => {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", title);
    return [canvas];
  }), brush, instant, cursor, tip);
  const selectionText = make("span"), selection = make("p", { className: "selection", hidden: true });
  selection.setAttribute("aria-live", "polite");
  const touch = "Drag to pan, pinch to zoom. Tap the curve to choose an instant, a block to see its details.";
  const keys = make("p", { className: "note keys", textContent: matchMedia("(pointer: coarse)").matches ? touch : "Scroll or W/S to zoom, Shift+drag or A/D to pan, drag to select a range, "
    + "F to zoom to the selection, [ and ] for the previous and next step, P for the peak, double-click or 0 for everything. "
    + "Click the curve to choose an instant, a block to see its details." });
  root.replaceChildren(tools, legend, area, selection, keys);
  const elements = { tools, legend, ruler, area, cursor, instant, brush, tip, selection, selectionText, isPanning: false };
  const hasSteps = data.steps.index.length > 0;
  elements.axisChoice = makeChoice("Axis", [["time", "time"], ["event", "events"]], "time", (axis) => store.set({ axis }, { push: true }));
  elements.axisChoice.hidden = !data.has_times;
  const colorings = COLORINGS.filter(([key]) => key === "category" || key === "size" || data.kinds.size.some((_, kind) => blockFields(data)[key].ofKind(kind)));
  elements.colorChoice = makeChoice("Color", colorings, "category", (color) => store.set({ color, hide: null }, { push: true }));
  elements.addTools = ({ navigation, select, clear, requestDraw }) => {
    elements.fit = makeButton("Fit height", () => store.set({ fit: store.get().fit === null ? "1" : null }), "Scale the height to the visible range");
    elements.pan = makeButton("Drag to pan", () => { elements.isPanning = !elements.isPanning; requestDraw(); }, "Dragging moves the view instead of selecting a range");
    tools.append(makeButton("Full range", navigation.showAll, "Key 0, or double-click"), makeButton(hasSteps ? "Peak step" : "Peak", navigation.showPeak, "Key P"));
    if (hasSteps) tools.append(makeButton("◀ step", () => navigation.showStep(-1), "Previous step: key ["), makeButton("step ▶", () => navigation.showStep(1), "Next step: key ]"));
    tools.append(makeButton("+", () => navigation.zoom(0.6), "Zoom in: key W"), makeButton("−", () => navigation.zoom(1 / 0.6), "Zoom out: key S"),
      elements.pan, elements.fit, elements.axisChoice, elements.colorChoice);
    selection.append(selectionText, " ", makeButton("Zoom to it", select, "Key F"), " ",
      makeButton("Allocated in it", () => store.set({ show: "range" }, { push: true }), "List the blocks allocated in the selected range"), " ",
      makeButton("Live at its end", () => store.set({ show: "kept" }, { push: true }), "List the blocks allocated in the selected range and live at its end"), " ",
      makeButton("Clear", clear, "Key Esc"));
  };
  return elements;
}

function drawRuler(canvas, axis, layout, theme) {
  const HEIGHT = 22, { pen } = prepareTrack(canvas, layout.width, HEIGHT);
  pen.strokeStyle = theme.muted;
  pen.fillStyle = theme.muted;
  pen.textAlign = "center";
  let free = layout.left; // where the next label may begin
  for (const { position, text } of axisTicks(axis, layout.plot, 110)) {
    const x = Math.round(layout.xOf(position)) + 0.5, half = pen.measureText(text).width / 2;
    pen.beginPath();
    pen.moveTo(x, HEIGHT - 5);
    pen.lineTo(x, HEIGHT);
    pen.stroke();
    const center = Math.min(Math.max(x, layout.left + half), layout.width - half - 1);
    if (center - half < free) continue;
    pen.fillText(text, center, 8);
    free = center + half + 10;
  }
  pen.textAlign = "left";
  pen.fillText(axis.isByEvent() ? "event" : "time", 2, 8);
}

// A button for each area of the curve, which hides and shows it, and a sample of each line.
function drawLegend(legend, { store, layers, colors }, curve) {
  const hidden = () => new Set((store.get().hide ?? "").split(",").filter(Boolean).map(Number));
  const shown = layers().map((layer) => ({ label: layer.label, color: colorOfLayer(layer, colors()) })), key = JSON.stringify(shown);
  if (legend.dataset.key !== key) {
    legend.dataset.key = key;
    legend.replaceChildren(...shown.map((layer, n) => makeLegendButton(layer, () => {
      const next = hidden();
      if (!next.delete(n)) next.add(n);
      store.set({ hide: [...next].sort((a, b) => a - b).join(",") || null }, { push: true });
    })), ...curve.lines.map(({ label, dash }) => {
      const sample = make("span", { className: "line" });
      sample.style.borderTopStyle = dash.length === 0 ? "solid" : dash[0] < 4 ? "dotted" : "dashed";
      return make("span", { className: "item" }, sample, label);
    }));
  }
  const now = hidden();
  legend.querySelectorAll("button").forEach((button, n) => button.setAttribute("aria-pressed", String(!now.has(n))));
}

function makeLegendButton({ label, color }, toggle) {
  const swatch = make("span", { className: "swatch" }), button = makeButton("", toggle, `${label}: click to hide or show it`);
  swatch.style.background = color;
  button.append(swatch, make("bdi", { textContent: label }));
  return button;
}

// The time at a position, with the digits that a pixel tells apart.
function preciseTime(axis, layout, us) {
  const [a, b] = axis.visible();
  return formatTick(us, niceStep(Math.max((b - a) / layout.plot, 0.001)), b);
}

// Shows lines [term, value, color] beside the pointer, inside the area.
function showTip(tip, area, event, rows) {
  tip.replaceChildren(...rows.map(([term, value, color]) => {
    const swatch = make("span", { className: "swatch" });
    if (color) swatch.style.background = color; else swatch.className = "";
    return make("div", {}, make("span", {}, swatch, make("bdi", { textContent: term })), make("bdi", { className: "value", textContent: value }));
  }));
  const box = area.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const left = x + 16 + tip.offsetWidth > box.width ? Math.max(0, x - 16 - tip.offsetWidth) : x + 16;
  tip.style.transform = `translate(${left}px, ${Math.min(y + 12, Math.max(0, box.height - tip.offsetHeight))}px)`;
}
