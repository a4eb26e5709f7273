// Blocks and segments by address: each block is a rectangle from its allocation to its free, in the segment that it lies in.
// Addresses that nothing uses are left out. Hold Ctrl (or pinch a touchpad) and scroll to zoom the addresses.

function createAddressTrack({ data, store, axis, colors, layout, coloring, matching }) {
  const canvas = make("canvas"), trackHeight = () => (layout.width > 1500 ? 380 : 280), { blocks, segments } = data, offset = data.addresses.offset;
  const fields = blockFields(data), byAxis = {}, local = { low: 0, high: 1 }; // visible addresses as shares of all
  const known = offset.some((value) => value >= 0);
  let span = 1;
  for (let i = 0; i < offset.length; i++) if (offset[i] >= 0) span = Math.max(span, offset[i] + blocks.size[i]);
  for (let i = 0; i < segments.size.length; i++) span = Math.max(span, segments.offset[i] + segments.size[i]);

  function rangesOf(name, { begin_row, end_row }) { // positions at which blocks or segments begin and end
    const key = `${name} ${axis.isByEvent() ? "event" : "time"}`, [first, last] = axis.full();
    byAxis[key] ??= {
      begin: Float64Array.from(begin_row, (row) => (row < 0 ? first : axis.positionOfRow(row))),
      end: Float64Array.from(end_row, (row) => (row >= data.num_rows ? last : axis.positionOfRow(row))),
    };
    return byAxis[key];
  }
  const lowest = () => local.low * span, visibleSpan = () => (local.high - local.low) * span;
  const yOf = (address) => trackHeight() - ((address - lowest()) / visibleSpan()) * trackHeight();
  const addressAt = (y) => lowest() + ((trackHeight() - y) / trackHeight()) * visibleSpan();

  function draw() {
    if (!known) return;
    const { pen, ratio } = prepareTrack(canvas, layout.width, trackHeight()), theme = colors();
    const width = Math.max(1, Math.round(layout.plot * ratio)), pixels = createPixels(width, Math.round(trackHeight() * ratio));
    const segmentFill = [mixColors(theme.muted, theme.panel, 0.2), mixColors(theme.accent, theme.panel, 0.25), mixColors(theme.muted, theme.panel, 0.3)].map((color) => pixelOf(color));
    paint(pixels, rangesOf("segments", segments), segments.offset, segments.size, (i) => segmentFill[segments.kind[i]], true);
    const { groups, codes } = coloring(), fills = groups.map(({ color }) => pixelOf(color)), isMatch = matching();
    const dimmed = groups.map(({ color }) => pixelOf(mixColors(color, theme.panel, 0.2)));
    const num = paint(pixels, rangesOf("blocks", blocks), offset, blocks.size, (i) => (isMatch && !isMatch[i] ? dimmed : fills)[codes[i]], false);
    pen.putImageData(pixels.image, Math.round(layout.left * ratio), 0);
    drawScale(pen, theme);
    drawChosen(pen, theme);
    canvas.dataset.blocks = String(num);
  }

  // Fills the rectangles that are visible and returns their number. Rectangles of some size keep a gap to their neighbors.
  function paint(pixels, { begin, end }, start, size, pixelAt, isFramed) {
    const [a, b] = axis.visible(), xScale = pixels.width / (b - a), low = lowest(), yScale = pixels.height / visibleSpan();
    let count = 0;
    for (let i = 0; i < begin.length; i++) {
      if (start[i] < 0 || begin[i] >= b || end[i] <= a || start[i] > low + visibleSpan() || start[i] + size[i] < low) continue;
      const x0 = Math.floor((begin[i] - a) * xScale), bottom = pixels.height - Math.floor((start[i] - low) * yScale);
      let x1 = Math.max(x0 + 1, Math.floor((end[i] - a) * xScale)), top = pixels.height - Math.floor((start[i] + size[i] - low) * yScale);
      if (top >= bottom) top = bottom - 1;
      if (x1 - x0 > 7 && !isFramed) x1--;
      if (bottom - top > 7 && !isFramed) top++;
      pixels.fill(x0, top, x1, bottom, pixelAt(i));
      count++;
    }
    return count;
  }

  function drawScale(pen, theme) {
    pen.fillStyle = theme.muted;
    pen.textAlign = "right";
    const step = 2 ** Math.ceil(Math.log2(Math.max(visibleSpan() / 5, 1)));
    for (let address = Math.ceil(lowest() / step) * step; address <= lowest() + visibleSpan(); address += step) {
      pen.fillText(formatRoundBytes(address), layout.left - 6, Math.min(trackHeight() - 7, Math.max(7, yOf(address))));
    }
    pen.textAlign = "left";
  }
  function drawChosen(pen, theme) {
    const i = blocks.block.indexOf(store.get().block ?? -1);
    if (i < 0 || offset[i] < 0) return;
    const { begin, end } = rangesOf("blocks", blocks), x0 = Math.max(layout.xOf(begin[i]), layout.left), x1 = Math.min(layout.xOf(end[i]), layout.left + layout.plot);
    if (x1 < layout.left || x0 > layout.left + layout.plot) return;
    const top = yOf(offset[i] + blocks.size[i]), height = Math.max(yOf(offset[i]) - top, 2);
    pen.lineWidth = 4;
    pen.strokeStyle = theme.panel;
    pen.strokeRect(x0 - 2, top - 2, Math.max(x1 - x0, 2) + 4, height + 4);
    pen.lineWidth = 2;
    pen.strokeStyle = theme.ink;
    pen.strokeRect(x0 - 2, top - 2, Math.max(x1 - x0, 2) + 4, height + 4);
  }

  // The block at a place, or else the nearest one within two pixels; and the segment.
  function find(position, y) {
    const { begin, end } = rangesOf("blocks", blocks), address = addressAt(y), [a, b] = axis.visible();
    const slackX = ((b - a) / layout.plot) * 2, slackY = (visibleSpan() / trackHeight()) * 2;
    let block = -1, least = Infinity;
    for (let i = 0; i < begin.length; i++) {
      if (offset[i] < 0 || begin[i] - slackX > position || end[i] + slackX < position || offset[i] - slackY > address || offset[i] + blocks.size[i] + slackY < address) continue;
      const distance = Math.max(0, begin[i] - position, position - end[i]) / slackX + Math.max(0, offset[i] - address, address - offset[i] - blocks.size[i]) / slackY;
      if (distance < least) { least = distance; block = i; }
    }
    const spans = rangesOf("segments", segments);
    let segment = -1;
    for (let i = 0; i < spans.begin.length && segment < 0; i++) {
      if (spans.begin[i] <= position && spans.end[i] > position && segments.offset[i] <= address && segments.offset[i] + segments.size[i] > address) segment = i;
    }
    return { block, segment };
  }
  function describe(position, y) {
    const { block: i, segment } = find(position, y), rows = [];
    if (i >= 0) {
      const { groups, codes } = coloring();
      rows.push([`block ${blocks.block[i]}`, formatBytes(blocks.size[i]), groups[codes[i]].color], ["category", data.categories[blocks.category[i]].label, null]);
      for (const field of ["name", "module", "operator", "site"].map((key) => fields[key])) {
        const text = field.ofKind(blocks.kind[i]);
        if (text) rows.push([field.label, text, null]);
      }
      if (lifetimeOf(blocks, i) >= 0) rows.push(["live for", formatTime(lifetimeOf(blocks, i)), null]);
    }
    if (segment >= 0) rows.push([data.segment_kinds[segments.kind[segment]], formatBytes(segments.size[segment]), null]);
    return rows;
  }
  function click(position, y) {
    const { block: i } = find(position, y);
    store.set({ block: i < 0 ? null : blocks.block[i] }, { push: true });
  }
  // Zooms the addresses about a place; returns whether anything changes.
  function zoomAddresses(y, factor) {
    const center = local.low + ((trackHeight() - y) / trackHeight()) * (local.high - local.low);
    const size = Math.min(1, Math.max((local.high - local.low) * factor, 1e-7));
    const low = Math.min(Math.max(center - (center - local.low) * (size / (local.high - local.low)), 0), 1 - size);
    const isChanged = size !== local.high - local.low;
    local.low = low;
    local.high = low + size;
    return isChanged;
  }
  return { canvas, draw, describe, click, zoomAddresses, isEmpty: !known, showAll: () => { local.low = 0; local.high = 1; },
    rangeOf: (i) => { const { begin, end } = rangesOf("blocks", blocks); return [begin[i], end[i]]; } };
}
