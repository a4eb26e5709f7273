// The memory curve: live bytes as stacked areas, lines for what the allocator and the driver count, and marks of the
// peak and of failed allocations. Every pixel column shows the highest values of its interval.

const CURVE_LINES = [["allocated", "allocated (with rounding)", [2, 3]], ["reserved", "reserved", []]];

function createCurveTrack({ data, store, axis, colors, layout, layers }) {
  const canvas = make("canvas"), trackHeight = () => (layout.width > 1500 ? 350 : 270);
  let total = null, totalOf = null; // sum of the visible layers, and the layers it belongs to
  let limit = 1, highestTotal = 0;

  const shownLayers = () => {
    const hidden = new Set((store.get().hide ?? "").split(",").filter(Boolean).map(Number));
    return layers().filter((_, n) => !hidden.has(n));
  };
  function shownTotal(shown) {
    const key = shown.map(({ label }) => label).join("\n");
    if (totalOf?.key === key && totalOf.layers === layers()) return total;
    total = new Float64Array(data.curve.event.length);
    for (const { values } of shown) for (let i = 0; i < total.length; i++) total[i] += values[i];
    totalOf = { key, layers: layers() };
    highestTotal = maximum(total);
    return total;
  }
  const lines = [
    ...CURVE_LINES.filter(([name]) => data.curve[name] && data.curve[name].some((value, i) => value !== data.total[i])).map(([name, label, dash]) =>
      ({ name, label, dash, values: data.curve[name], positions: () => axis.positions() })),
    ...(data.device_used.bytes.length ? [{ name: "device_used", label: "used on the device by all processes", dash: [7, 4],
      values: data.device_used.bytes, positions: () => axis.positionsOf(data.device_used.time_us) }] : []),
  ];

  // What the columns of a range show: the highest instant of the areas, and the highest value of each line.
  function columnsOf([a, b], count) {
    const shown = shownLayers(), sum = shownTotal(shown);
    const best = highestPerColumn(axis.positions(), sum, a, b, count);
    const drawn = lines.map((line) => {
      const positions = line.positions(), start = positions.length ? positions[0] : Infinity;
      const places = highestPerColumn(positions, line.values, a, b, count), width = (b - a) / count;
      return { ...line, at: (column) => (a + (column + 1) * width > start ? line.values[places[column]] : null) };
    });
    return { shown, sum, best, drawn };
  }
  function chooseLimit({ sum, best, drawn }) {
    const isFit = store.get().fit !== null;
    let highest = 1;
    if (isFit) {
      for (let column = 0; column < best.length; column++) {
        highest = Math.max(highest, sum[best[column]], ...drawn.map((line) => line.at(column) ?? 0));
      }
    } else {
      highest = Math.max(highestTotal, ...lines.map((line) => (line.highest ??= maximum(line.values))), 1);
      for (const i of data.failures.bytes.keys()) highest = Math.max(highest, Math.min(failureTop(i), highest * 1.5));
    }
    if (data.capacity_bytes && data.capacity_bytes < highest * 2.5 && !isFit) highest = Math.max(highest, data.capacity_bytes);
    return highest * 1.06;
  }
  const levelAtRow = (row) => { const place = data.placeOfRow(row); return Math.max(data.total[place], data.curve.allocated?.[place] ?? 0); };
  const failureTop = (i) => Math.max(0, data.failures.bytes[i]) + levelAtRow(data.failures.event[i]);
  const yOf = (bytes) => trackHeight() - (bytes / limit) * trackHeight();

  function draw() {
    const { pen, ratio } = prepareTrack(canvas, layout.width, trackHeight()), range = axis.visible();
    const count = Math.max(1, Math.round(layout.plot * ratio)), columns = columnsOf(range, count);
    limit = chooseLimit(columns);
    drawAreas(pen, ratio, count, columns);
    drawGrid(pen);
    drawSteps(pen);
    for (const line of columns.drawn) drawLine(pen, line, count);
    drawCapacity(pen);
    drawFailures(pen);
    drawPeak(pen);
    canvas.dataset.limit = String(limit);
    canvas.dataset.highest = String(columns.best.reduce((most, place) => Math.max(most, columns.sum[place]), 0));
    canvas.dataset.points = String(data.curve.event.length);
  }

  function drawAreas(pen, ratio, count, { shown, best }) {
    const height = Math.round(trackHeight() * ratio), pixels = createPixels(count, height);
    const fills = shown.map((layer) => pixelOf(colorOfLayer(layer, colors())));
    for (let column = 0; column < count;) {
      let end = column + 1;
      while (end < count && best[end] === best[column]) end++;
      let bytes = 0, bottom = height;
      shown.forEach(({ values }, n) => {
        bytes += values[best[column]];
        const top = Math.round(height - (bytes / limit) * height);
        pixels.fill(column, top, end, bottom, fills[n]);
        bottom = Math.min(bottom, top);
      });
      column = end;
    }
    pen.putImageData(pixels.image, Math.round(layout.left * ratio), 0);
  }

  function drawGrid(pen) {
    pen.fillStyle = colors().muted;
    pen.strokeStyle = mixColors(colors().muted, colors().panel, 0.5);
    pen.globalAlpha = 0.45;
    pen.lineWidth = 1;
    for (const bytes of byteTicks(limit, 6)) {
      const y = Math.round(yOf(bytes)) - 0.5;
      pen.beginPath();
      pen.moveTo(layout.left, y);
      pen.lineTo(layout.left + layout.plot, y);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.textAlign = "right";
    for (const bytes of byteTicks(limit, 6)) {
      pen.fillText(formatRoundBytes(bytes), layout.left - 6, Math.min(trackHeight() - 7, Math.max(7, yOf(bytes))));
    }
    pen.textAlign = "left";
  }

  function drawSteps(pen) { // where steps begin, unless the lines would cover the curve
    const { start_us } = data.steps, xs = Array.from(start_us, (us) => layout.xOf(axis.positionOfTime(us)));
    const inside = xs.filter((x) => x > layout.left + 1 && x < layout.left + layout.plot);
    if (inside.length > layout.plot / 12) return;
    pen.fillStyle = colors().muted;
    pen.globalAlpha = 0.5;
    for (const x of inside) pen.fillRect(Math.round(x), 0, 1, trackHeight());
    pen.globalAlpha = 1;
  }

  function drawLine(pen, line, count) {
    pen.strokeStyle = colors().ink;
    pen.lineWidth = 1.4;
    pen.setLineDash(line.dash);
    pen.beginPath();
    let isDown = false;
    for (let column = 0; column < count; column++) {
      const value = line.at(column);
      if (value === null) continue;
      const x = layout.left + (column / count) * layout.plot, y = yOf(value);
      if (isDown) pen.lineTo(x, y); else pen.moveTo(x, y);
      pen.lineTo(x + layout.plot / count, y);
      isDown = true;
    }
    pen.stroke();
    pen.setLineDash([]);
  }

  function drawCapacity(pen) {
    if (!data.capacity_bytes || data.capacity_bytes > limit) return;
    const y = yOf(data.capacity_bytes);
    pen.strokeStyle = pen.fillStyle = colors().warn;
    pen.setLineDash([10, 4]);
    pen.beginPath();
    pen.moveTo(layout.left, y);
    pen.lineTo(layout.left + layout.plot, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillText(`capacity ${formatBytes(data.capacity_bytes)}`, layout.left + 6, y + 9);
  }

  function drawFailures(pen) {
    const { event, bytes } = data.failures;
    pen.strokeStyle = pen.fillStyle = colors().warn;
    let free = -Infinity; // where the next label fits
    for (let i = 0; i < event.length; i++) {
      const x = layout.xOf(axis.isByEvent() ? event[i] : data.failures.time_us[i]);
      if (x < layout.left || x > layout.left + layout.plot) continue;
      const top = Math.max(1, yOf(failureTop(i)));
      pen.lineWidth = 2;
      pen.beginPath();
      pen.moveTo(x, yOf(levelAtRow(event[i])));
      pen.lineTo(x, top);
      pen.moveTo(x - 4, top);
      pen.lineTo(x + 4, top);
      pen.stroke();
      const label = bytes[i] >= 0 ? `out of memory: ${formatBytes(bytes[i])}` : "out of memory", width = pen.measureText(label).width;
      const left = Math.min(x + 6, layout.left + layout.plot - width);
      if (left > free) { labelOn(pen, label, left, Math.max(9, top + 2)); free = left + width + 8; }
    }
  }

  function drawPeak(pen) {
    const x = layout.xOf(axis.positionOfRow(data.peak.row)), y = yOf(data.peak.bytes);
    if (x < layout.left || x > layout.left + layout.plot || y < -1) return;
    pen.fillStyle = colors().ink;
    pen.beginPath();
    pen.arc(x, y, 3.5, 0, 2 * Math.PI);
    pen.fill();
    const label = `peak ${formatBytes(data.peak.bytes)}`, width = pen.measureText(label).width;
    labelOn(pen, label, x + 10 + width > layout.left + layout.plot ? x - 10 - width : x + 10, Math.max(9, y - 2));
  }

  function labelOn(pen, label, x, y) { // on a background, because areas and lines are below it
    const color = pen.fillStyle;
    pen.fillStyle = colors().panel;
    pen.globalAlpha = 0.85;
    pen.fillRect(x - 3, y - 8, pen.measureText(label).width + 6, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = color;
    pen.fillText(label, x, y);
  }

  // Lines of the tooltip: [text, value, color].
  function describe(position) {
    const positions = axis.positions(), place = Math.max(0, lowerBound(positions, position + 1e-9) - 1);
    const shown = shownLayers().filter(({ values }) => values[place] > 0);
    const rows = shown.reverse().map((layer) => [layer.label, formatBytes(layer.values[place]), colorOfLayer(layer, colors())]);
    rows.push(["live (requested)", formatBytes(data.total[place]), null]);
    for (const line of lines) {
      const at = lowerBound(line.positions(), position + 1e-9) - 1;
      if (at >= 0) rows.push([line.label, formatBytes(line.values[at]), null]);
    }
    return rows;
  }

  return { canvas, draw, describe, lines, click: (position) => store.set({ show: null, at: axis.rowAt(position) }, { push: true }) };
}

const maximum = (values) => { let most = 0; for (const value of values) if (value > most) most = value; return most; };

// Bytes that are a multiple of a power of two, without digits behind the point.
function formatRoundBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (power + 1 < units.length && bytes >= 1024 ** (power + 1) && Number.isInteger(bytes / 1024 ** (power + 1) * 4)) power++;
  return `${bytes / 1024 ** power} ${units[power]}`;
}
