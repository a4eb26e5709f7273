// The timeline: decodes the fine curve, and at every zoom draws the visible window in the resolution of the screen.
// Times are microseconds since the start of the recording, curves are bytes.

// The twin of memtrace.units.format_bytes, for hover texts at every zoom; tests/dashboards/test_page.py compares them.
function memtraceFormatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  // 1023.96 KiB would round to 1,024 KiB.
  while (power + 1 < units.length && Number((Math.abs(bytes) / 1024 ** power).toFixed(1)) >= 1024) power++;
  const scaled = bytes / 1024 ** power, size = Math.abs(scaled);
  const digits = power === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${scaled.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${units[power]}`;
}

async function memtraceDecode({ length, columns, data }) { // inverse of memtrace.dashboards.delta_encoding.encode_columns
  const deflated = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const unpacked = {};
  let start = 0;
  for (const [name, width] of columns) {
    const values = new Float64Array(length);
    for (let plane = 0, weight = 1; plane < width; plane++, weight *= 256, start += length) {
      for (let i = 0; i < length; i++) values[i] += planes[start + i] * weight;
    }
    for (let i = 0, sum = 0; i < length; i++) {
      const coded = values[i];
      sum += coded % 2 ? -(coded + 1) / 2 : coded / 2;
      values[i] = sum;
    }
    unpacked[name] = values;
  }
  return unpacked;
}

function memtraceLowerBound(sorted, value) { // index of the first entry that is not below value
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// Indices to draw among low..high (inclusive): the lowest, highest and last value of every bin, in order, so that
// every peak shows and the level between bins is right.
function memtraceDecimate(x, total, low, high, bins) {
  const all = high - low + 1;
  if (all <= 3 * bins) return Uint32Array.from({ length: all }, (_, i) => low + i);
  const kept = [], width = (x[high] - x[low]) / bins || 1;
  for (let i = low; i <= high;) {
    const edge = x[low] + (Math.floor((x[i] - x[low]) / width) + 1) * width;
    let min = i, max = i, last = i;
    for (; i <= high && (x[i] < edge || i === last); i++) {
      if (total[i] < total[min]) min = i;
      if (total[i] > total[max]) max = i;
      last = i;
    }
    for (const place of [Math.min(min, max), Math.max(min, max), last]) {
      if (place !== kept[kept.length - 1]) kept.push(place);
    }
  }
  return Uint32Array.from(kept);
}

async function memtraceTimeline(figure, meta, colors) {
  "use strict";
  const PHASES = ["forward", "backward", "optimizer"];
  const [curve, steps, phases] = await Promise.all(
    [meta.curve, meta.lanes.steps, meta.lanes.phases].map(memtraceDecode));
  const count = curve.time_us.length;
  const categories = figure.data.map((trace) => trace.meta.column);
  const total = new Float64Array(count), top = new Float64Array(count);
  for (const name of meta.stacked) for (let i = 0; i < count; i++) total[i] += curve[name][i];
  for (let i = 0; i < count; i++) top[i] = Math.max(total[i], curve.allocated?.[i] ?? 0, curve.reserved?.[i] ?? 0);

  let byEvent = false, fitHeight = false, zoomed = null; // zoomed: the window in units of x; null: the whole recording
  let notifyZoom = () => {}, notifyClick = () => {}, marked = null; // marked: place of the marked instant on the curve
  const usPerUnit = meta.ns_per_unit / 1000;
  const source = () => (byEvent ? curve.event : curve.time_us);
  const scale = () => (byEvent ? 1 : usPerUnit);
  const full = () => [Math.min(0, source()[0] / scale()), source()[count - 1] / scale()];
  const placeAt = (us) => Math.max(0, memtraceLowerBound(curve.time_us, us + 1) - 1);
  const xOf = (us) => (byEvent ? curve.event[placeAt(us)] : us / usPerUnit);
  const pixels = () => figure._fullLayout?._size?.w || 1000;

  function lane(spans, y0, y1, window, named, tone) { // rectangles and labels of one lane below the curve
    const shapes = [], annotations = [], perUnit = pixels() / (window[1] - window[0]);
    let hidden = 0, lastLabel = -Infinity;
    const length = spans.start_us.length;
    for (let i = 0; i < length && shapes.length < 600; i++) {
      const x0 = Math.max(xOf(spans.start_us[i]), window[0]), x1 = Math.min(xOf(spans.end_us[i]), window[1]);
      if (x1 <= x0) continue;
      const width = (x1 - x0) * perUnit;
      if (width < 2) { hidden++; continue; }
      const paint = tone(spans.index[i]);
      shapes.push({ type: "rect", xref: "x", yref: "paper", x0, x1, y0, y1, layer: "above",
        fillcolor: paint.fill, line: { width: 0.5, color: colors().panel } });
      const text = named(spans.index[i]).find((name) => name.length * 7.2 + 6 < width);
      const middle = (x0 + x1) / 2;
      if (text && (middle - lastLabel) * perUnit > text.length * 7.2) {
        annotations.push({ x: middle, y: (y0 + y1) / 2, xref: "x", yref: "paper", yanchor: "middle", text, showarrow: false,
          font: { size: 11, color: paint.ink } });
        lastLabel = middle;
      }
    }
    if (hidden && hidden > shapes.length) {
      annotations.push({ x: 0.5, y: (y0 + y1) / 2, xref: "paper", yref: "paper", yanchor: "middle", showarrow: false,
        text: "too many to show: zoom in", font: { size: 11, color: colors().muted } });
    }
    return { shapes, annotations };
  }

  function bands(window) {
    const paint = colors();
    const stepLane = lane(steps, 0, 0.05, window, (n) => [`step ${n}`, `${n}`],
      (n) => ({ fill: n % 2 ? paint.band : paint.rule, ink: paint.ink }));
    const phaseLane = lane(phases, 0.055, 0.105, window, (n) => [PHASES[n], PHASES[n][0].toUpperCase()],
      (n) => ({ fill: paint[`phase-${PHASES[n]}`], ink: paint[`phase-${PHASES[n]}-ink`] }));
    const stripes = stepLane.shapes.filter((shape) => shape.fillcolor === paint.band)
      .map((shape) => ({ ...shape, y0: 0.12, y1: 1, layer: "below", line: { width: 0 } }));
    const names = [];
    if (steps.start_us.length) names.push(["steps", 0.025]);
    if (phases.start_us.length) names.push(["phases", 0.08]);
    return {
      shapes: [...stripes, ...stepLane.shapes, ...phaseLane.shapes],
      annotations: [...stepLane.annotations, ...phaseLane.annotations, ...names.map(([text, y]) => ({
        x: 0, y, xref: "paper", yref: "paper", xanchor: "right", yanchor: "middle", xshift: -6, text, showarrow: false,
        font: { size: 11, color: paint.muted } }))],
    };
  }

  function instantMark() { // a line at the instant whose blocks the explorer shows
    if (marked === null) return [];
    const x = source()[marked] / scale();
    return [{ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0.12, y1: 1, line: { width: 1.5, color: colors().ink } }];
  }

  function peakMark(window) {
    const x = byEvent ? meta.peak.event : meta.peak.time_ns / meta.ns_per_unit;
    if (x < window[0] || x > window[1]) return [];
    const along = (x - window[0]) / (window[1] - window[0] || 1);
    return [{ x, y: meta.peak.y, text: meta.peak.text, showarrow: true, arrowhead: 2, ax: along < 0.5 ? 30 : -30, ay: -24,
      xanchor: along < 0.5 ? "left" : "right", font: { color: colors().ink }, arrowcolor: colors().ink,
      bgcolor: colors().panel, borderpad: 2 }];
  }

  function heights(places) {
    let low = Infinity, high = 0;
    for (const i of places) { low = Math.min(low, total[i]); high = Math.max(high, top[i]); }
    if (!fitHeight) return [0, meta.top * 1.12];
    const margin = Math.max((high - low) * 0.08, high * 0.001, 1);
    return [Math.max(0, low - margin) / meta.bytes_per_unit, (high + margin) / meta.bytes_per_unit];
  }

  function redraw() {
    const window = zoomed ?? full(), x = source(), unit = scale();
    const low = Math.max(0, memtraceLowerBound(x, window[0] * unit) - 1);
    const high = Math.min(count - 1, memtraceLowerBound(x, window[1] * unit));
    const places = memtraceDecimate(x, total, low, high, Math.max(200, Math.round(pixels() / 1.5)));
    const xs = Float64Array.from(places, (i) => x[i] / unit);
    const ys = categories.map((name) => Float64Array.from(places, (i) => curve[name][i] / meta.bytes_per_unit));
    const texts = categories.map((name) => Array.from(places, (i) => memtraceFormatBytes(curve[name][i])));
    const drawnBands = bands(window);
    figure.dataset.points = String(places.length);
    return Plotly.update(figure, { x: categories.map(() => xs), y: ys, customdata: texts, hovertemplate: "%{customdata}" }, {
      "xaxis.range": [...window],
      "xaxis.autorange": false,
      "xaxis.unifiedhovertitle.text": byEvent ? "event %{x:,.0f}" : `%{x:,.4~f} ${meta.time_unit}`,
      "xaxis.title.text": byEvent ? "event number" : `time since the start of the recording (${meta.time_unit})`,
      "yaxis.range": heights(places),
      shapes: [...drawnBands.shapes, ...instantMark()],
      annotations: [...drawnBands.annotations, ...peakMark(window)],
    });
  }

  function zoom(window) {
    const [first, last] = full();
    if (window) {
      const span = Math.min(window[1] - window[0], last - first);
      const start = Math.min(Math.max(window[0], first), last - span);
      window = span >= last - first ? null : [start, start + span];
    }
    zoomed = window;
    if (!byEvent) notifyZoom(zoomed?.map((x) => x * meta.ns_per_unit) ?? null);
    else notifyZoom(undefined);
    return redraw();
  }

  const current = () => zoomed ?? full();
  const pan = (part) => { const [a, b] = current(); return zoom([a + (b - a) * part, b + (b - a) * part]); };
  const magnify = (factor) => {
    const [a, b] = current(), half = ((b - a) * factor) / 2;
    return zoom([(a + b) / 2 - half, (a + b) / 2 + half]);
  };
  function toPeak() {
    const us = meta.peak.time_ns / 1000;
    for (let i = 0; i < steps.start_us.length; i++) {
      if (steps.start_us[i] <= us && us <= steps.end_us[i]) return zoom([xOf(steps.start_us[i]), xOf(steps.end_us[i])]);
    }
    const [first, last] = full(), at = xOf(us), half = (last - first) / 40;
    return zoom([at - half, at + half]);
  }

  figure.on("plotly_relayout", (change) => {
    if (change["xaxis.autorange"]) zoom(null);
    else if ("xaxis.range[0]" in change) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    else if (change.width || change.height || change.autosize) redraw();
  });

  figure.on("plotly_click", ({ points: [point] }) => {
    const place = Math.max(0, memtraceLowerBound(source(), point.x * scale() + 1e-6) - 1);
    notifyClick(curve.event[place]);
  });

  const tools = figure.parentElement.querySelector(".tools");
  function button(text, title, act) {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
    made.addEventListener("click", () => act(made));
    tools.append(made);
    return made;
  }
  const gap = () => tools.append(Object.assign(document.createElement("span"), { className: "gap" }));
  const press = (made, on) => made.setAttribute("aria-pressed", String(on));
  button("Full range", "Show the whole recording (key 0)", () => zoom(null));
  button(steps.start_us.length ? "Peak step" : "Peak", "Zoom in on the peak (key P)", toPeak);
  button("◀", "Earlier (left arrow)", () => pan(-0.25));
  button("▶", "Later (right arrow)", () => pan(0.25));
  button("+", "Zoom in (key +)", () => magnify(0.5));
  button("−", "Zoom out (key -)", () => magnify(2));
  gap();
  const byTime = button("By time", "Horizontal axis: time", () => setAxis(false));
  const byNumber = button("By event", "Horizontal axis: event number, which spreads out moments with many events", () => setAxis(true));
  gap();
  press(button("Fit height", "Scale the vertical axis to the visible curve instead of starting at 0", (made) => {
    fitHeight = !fitHeight;
    press(made, fitHeight);
    redraw();
  }), false);
  function setAxis(events) {
    const window = zoomed && zoomed.map((x) => (byEvent ? curve.time_us[memtraceLowerBound(curve.event, x)] ?? 0 : x * usPerUnit));
    byEvent = events;
    press(byTime, !events);
    press(byNumber, events);
    return zoom(window && window.map(xOf));
  }
  const keys = { ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), "+": () => magnify(0.5), "=": () => magnify(0.5),
    "-": () => magnify(2), 0: () => zoom(null), p: toPeak };
  figure.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key] ?? keys[event.key.toLowerCase()];
    if (act) { event.preventDefault(); act(); }
  });

  press(byTime, true);
  press(byNumber, false);
  await redraw();
  const placeOfRow = (row) => Math.max(0, memtraceLowerBound(curve.event, row + 1) - 1);
  return {
    redraw, zoom, curve, total,
    onZoom: (listener) => { notifyZoom = listener; },
    onClick: (listener) => { notifyClick = listener; },
    mark: (row) => { marked = placeOfRow(row); return redraw(); },
    timeAt: (row) => curve.time_us[placeOfRow(row)],
    bytesAt: (row) => total[placeOfRow(row)],
    visibleRows: () => (zoomed ?? full()).map((x) => (byEvent ? x : curve.event[placeAt(x * usPerUnit)])),
  };
}
