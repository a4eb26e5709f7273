// Lanes of spans: steps, phases, and what the program did (pipeline actions, annotations, modules, operators). Click a step
// or a module to choose it, any other span to select its range.

function createLanesTrack({ data, store, axis, colors, layout }) {
  const ROW = 16, canvas = make("canvas");
  const lanes = [];
  const addLane = (lane) => { if (lane.start_us.length) lanes.push(lane); };
  addLane({ title: "steps", kind: "step", ...data.steps, textOf: (i) => `step ${data.steps.index[i]}`, labelOf: (i) => String(data.steps.index[i]) });
  addLane({ title: "phases", kind: "phase", ...data.phase_spans, textOf: (i) => data.phases[data.phase_spans.index[i]] });
  for (const lane of data.lanes) {
    const columns = data[lane.name];
    addLane({ title: lane.title, kind: lane.name.replace("lane_", ""), note: lane.note, colors: lane.colors, ...columns,
      textOf: (i) => lane.texts[columns.text[i]] ?? "(name not on this page)",
      ...(lane.name === "lane_module" ? { shortOf: (i) => leafOf(lane.texts[columns.text[i]] ?? "") } : {}) });
  }
  for (const lane of lanes) {
    lane.rows = splitRows(lane);
    lane.byAxis = {};
  }
  const height = lanes.reduce((sum, lane) => sum + lane.rows.length * ROW + 3, 0);

  // Ranges of the items of each row: items are ordered by row, then by start.
  function splitRows({ row, start_us }) {
    if (!row) return [[0, start_us.length]];
    const rows = [];
    for (let first = 0; first < row.length;) {
      let end = first;
      while (end < row.length && row[end] === row[first]) end++;
      rows.push([first, end]);
      first = end;
    }
    return rows;
  }
  function spansOf(lane) { // starts and ends on the current axis
    const key = axis.isByEvent() ? "event" : "time";
    lane.byAxis[key] ??= { start: axis.positionsOf(lane.start_us), end: axis.positionsOf(lane.end_us) };
    return lane.byAxis[key];
  }

  function draw() {
    if (!lanes.length) return;
    const { pen } = prepareTrack(canvas, layout.width, height), [a, b] = axis.visible();
    let y = 0, drawnSpans = 0;
    for (const lane of lanes) {
      pen.fillStyle = colors().muted;
      if (layout.left < 80) pen.font = "11px system-ui, sans-serif";
      fillTextWithin(pen, lane.title, 2, y + ROW / 2, layout.left - 6);
      const { start, end } = spansOf(lane);
      pen.font = "12px system-ui, sans-serif";
      pen.save();
      pen.beginPath();
      pen.rect(layout.left, y, layout.plot, lane.rows.length * ROW);
      pen.clip();
      for (const [first, last] of lane.rows) {
        drawnSpans += drawRow(pen, lane, start, end, first, last, y, a, b);
        y += ROW;
      }
      pen.restore();
      y += 3;
    }
    canvas.dataset.spans = String(drawnSpans);
  }

  function drawRow(pen, lane, start, end, first, last, y, a, b) {
    let covered = -Infinity, drawn = 0; // the pixel up to which the row is drawn
    const from = firstEndAfter(end, first, last, a);
    for (let i = from; i < last && start[i] <= b; i++) {
      const x0 = Math.max(layout.xOf(start[i]), layout.left - 2), x1 = Math.min(layout.xOf(end[i]), layout.left + layout.plot + 2);
      if (x1 <= covered && x1 - x0 < 1) continue;
      const [fill, ink] = colorsOf(lane, i), width = Math.max(x1 - x0 - (x1 - x0 > 3 ? 1 : 0), 0.75);
      pen.fillStyle = fill;
      pen.fillRect(x0, y, width, ROW - 2);
      if (isChosen(lane, i)) { pen.strokeStyle = colors().accent; pen.lineWidth = 2; pen.strokeRect(x0 + 1, y + 1, Math.max(width - 2, 1), ROW - 4); }
      if (width > 14) {
        const left = Math.max(x0, layout.left);
        pen.fillStyle = ink;
        const label = lane.shortOf ? lane.shortOf(i) : lane.labelOf && width < 60 ? lane.labelOf(i) : lane.textOf(i);
        if (lane.labelOf && width < 28) { if (pen.measureText(label).width < width) pen.fillText(label, left + 2, y + ROW / 2 - 1); }
        else fillTextWithin(pen, label, left + 4, y + ROW / 2 - 1, x0 + width - left - 6);
      }
      covered = Math.ceil(x0 + width);
      drawn++;
    }
    return drawn;
  }
  function firstEndAfter(end, first, last, position) { // spans of one row do not overlap, so that ends are sorted too
    let low = first, high = last;
    while (low < high) { const middle = (low + high) >> 1; if (end[middle] <= position) low = middle + 1; else high = middle; }
    return low;
  }

  function colorsOf(lane, i) {
    const theme = colors();
    if (lane.kind === "phase") { const name = data.phases[lane.index[i]]; return [theme[`phase-${name}`] ?? theme.band, theme[`phase-${name}-ink`] ?? theme.ink]; }
    if (lane.kind === "step") return [lane.index[i] % 2 ? theme.rule : mixColors(theme.rule, theme.band, 0.35), theme.ink];
    const color = lane.colors?.[lane.text[i]];
    if (color) return [color, inkOn(color)];
    return [i % 2 ? theme.rule : mixColors(theme.rule, theme.accent, 0.8), theme.ink];
  }
  function isChosen(lane, i) {
    const { step, module } = store.get();
    return lane.kind === "step" ? step === lane.index[i] : lane.kind === "module" && Boolean(module) && lane.textOf(i) === module;
  }

  function find(position, y) {
    let top = 0;
    for (const lane of lanes) {
      const bottom = top + lane.rows.length * ROW;
      if (y >= top && y < bottom) {
        const { start, end } = spansOf(lane), [first, last] = lane.rows[Math.floor((y - top) / ROW)];
        const [a, b] = axis.visible(), slack = ((b - a) / layout.plot) * 1.5;
        for (let i = firstEndAfter(end, first, last, position - slack); i < last && start[i] <= position + slack; i++) return { lane, i };
        return { lane, i: -1 };
      }
      top = bottom + 3;
    }
    return null;
  }
  function describe(position, y) {
    const found = find(position, y);
    if (!found) return [];
    const { lane, i } = found;
    if (i < 0) return lane.note ? [[`${lane.title}: ${lane.note}`, "", null]] : [];
    const rows = [[lane.textOf(i), "", lane.colors?.[lane.text?.[i]] ?? null]];
    if (data.has_times) rows.push(["duration", formatTime(lane.end_us[i] - lane.start_us[i]), null], ["start", formatTime(lane.start_us[i]), null]);
    const before = data.total[data.placeAt(lane.start_us[i])], after = data.total[data.placeAt(lane.end_us[i])];
    rows.push(["live bytes, start to end", `${after >= before ? "+" : "−"}${formatBytes(Math.abs(after - before))}`, null]);
    return rows;
  }
  function click(position, y) {
    const found = find(position, y);
    if (!found || found.i < 0) return;
    const { lane, i } = found, { step, module } = store.get();
    if (lane.kind === "step") store.set({ step: step === lane.index[i] ? null : lane.index[i], at: null }, { push: true });
    else if (lane.kind === "module") store.set({ module: module === lane.textOf(i) ? null : lane.textOf(i) }, { push: true });
    else store.set({ brush: [lane.start_us[i], Math.max(lane.end_us[i], lane.start_us[i] + 1)], show: "range" }, { push: true });
  }
  return { canvas, draw, describe, click, isEmpty: !lanes.length };
}

// The last part of a module's name, which tells it from its neighbors: its parent is the row above. A number keeps the
// part before it: layers.0.
function leafOf(name) {
  const parts = name.split("."), last = parts[parts.length - 1];
  return /^\d+$/.test(last) && parts.length > 1 ? `${parts[parts.length - 2]}.${last}` : last;
}
