// The stacked areas of the memory curve: by category, or by what else the colors mean (colors.js).

// Which blocks belong to the chosen step and module: a byte per block, or null for all of them.
function matchingBlocks(data, { step, module }) {
  const { blocks, kinds } = data;
  if (step === null && !module) return null;
  const inModule = Uint8Array.from(kinds.module, (index) => Number(!module || isInModule(data.modules[index], module)));
  return Uint8Array.from(blocks.kind, (kind, i) => Number((step === null || blocks.step[i] === step) && inModule[kind]));
}

// The first place in the curve that is not before a row of events; the length of the curve after its last one.
function firstPlaceFrom(data, row) {
  const place = data.placeOfRow(row);
  return data.curve.event[place] >= row ? place : place + 1;
}

// Bytes of each group at every point of the curve: [{ label, color, values }], bottom to top. What the groups lack of the
// curve's total, because the page has not all blocks or because they do not match, is a layer of its own.
function layerBlocks(data, { groups, codes, order }, matching) {
  const { blocks, curve } = data, length = curve.event.length;
  const layers = groups.map(({ label, color }) => ({ label, color, values: new Float64Array(length), isUsed: false }));
  for (let i = 0; i < codes.length; i++) {
    if (matching && !matching[i]) continue;
    const { values } = layers[codes[i]], begin = firstPlaceFrom(data, blocks.begin_row[i]), end = firstPlaceFrom(data, blocks.end_row[i]);
    layers[codes[i]].isUsed = true;
    if (begin < length) values[begin] += blocks.size[i];
    if (end < length) values[end] -= blocks.size[i];
  }
  const rest = Float64Array.from(data.total);
  for (const { values } of layers) {
    for (let i = 0, sum = 0; i < length; i++) { sum += values[i]; values[i] = sum; rest[i] -= sum; }
  }
  const shown = order.map((code) => layers[code]).filter((layer) => layer.isUsed);
  if (rest.some((bytes) => bytes > 0)) {
    shown.push({ label: matching ? "other blocks" : "blocks not on this page", isRest: true, values: rest.map((bytes) => Math.max(0, bytes)) });
  }
  return shown;
}

// The blocks that are no group of their own are in the background.
const colorOfLayer = ({ isRest, color }, theme) => (isRest ? mixColors(theme.muted, theme.panel, 0.35) : color);

// The layers of the curve: by category they are columns of the curve itself, exact whatever blocks the page has.
function curveLayers(data, mode, coloring, matching) {
  if (mode !== "category" || matching) return layerBlocks(data, coloring, matching);
  const columns = data.stack_order.map((code) => ({ ...data.categories[code], values: data.curve[data.categories[code].name] }));
  return columns.filter(({ values }) => values.some((bytes) => bytes > 0));
}
