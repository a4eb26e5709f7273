// What the colors of blocks mean: their categories, or the largest groups by another property.
const COLORINGS = [["category", "category"], ["site", "allocation site"], ["module", "module"], ["operator", "operator"],
  ["stream", "stream"], ["size", "size"]];
const OTHERS_COLOR = "#cfd5da";
const SIZE_LIMITS = [[4 * 2 ** 10, "below 4 KiB"], [2 ** 20, "4 KiB to 1 MiB"], [16 * 2 ** 20, "1 to 16 MiB"], [64 * 2 ** 20, "16 to 64 MiB"],
  [256 * 2 ** 20, "64 to 256 MiB"], [Infinity, "256 MiB and more"]];

// Colors by category, or by another property where most bytes at the peak are of unknown category.
function defaultColoring(data) {
  const { blocks } = data, row = data.peak.row, unknown = data.categories.findIndex((category) => category.name === "unknown");
  let all = 0, unknownBytes = 0;
  for (let i = 0; i < blocks.size.length && blocks.begin_row[i] <= row; i++) {
    if (blocks.end_row[i] <= row) continue;
    all += blocks.size[i];
    if (blocks.category[i] === unknown) unknownBytes += blocks.size[i];
  }
  if (unknownBytes * 2 <= all) return "category";
  return data.sites.some(Boolean) ? "site" : "size";
}

// The groups of the blocks: { groups: [{ label, color }], codes: index of the group by block }.
function colorBlocks(data, mode) {
  const { blocks } = data, count = blocks.size.length;
  if (mode === "category") {
    return { groups: data.categories.map(({ label, color }) => ({ label, color })), codes: Uint8Array.from(blocks.category), order: data.stack_order };
  }
  if (mode === "size") {
    const codes = Uint8Array.from(blocks.size, (size) => SIZE_LIMITS.findIndex(([limit]) => size < limit));
    return inOrder(SIZE_LIMITS.map(([, label], n) => ({ label, color: data.series_colors[n] })), codes);
  }
  const texts = { site: data.sites, module: data.modules, operator: data.operators }[mode];
  const keys = mode === "stream" ? blocks.stream : blocks[mode];
  if (!keys) return colorBlocks(data, "category");
  // Groups in the order of their bytes at the moment when they have most matter most: those live longest count most.
  const weight = new Map();
  for (let i = 0; i < count; i++) {
    const share = (blocks.end_row[i] - blocks.begin_row[i]) / (data.num_rows + 1);
    weight.set(keys[i], (weight.get(keys[i]) ?? 0) + blocks.size[i] * share);
  }
  const isUnknown = (key) => (texts ? !texts[key] : key < 0);
  const largest = [...weight.keys()].filter((key) => !isUnknown(key)).sort((x, y) => weight.get(y) - weight.get(x)).slice(0, data.series_colors.length);
  const unknown = data.categories[data.categories.length - 1].color;
  const label = (key) => (texts ? texts[key] : `stream ${key}`);
  const groups = largest.map((key, n) => ({ label: label(key), color: data.series_colors[n] }));
  const known = new Map(largest.map((key, n) => [key, n]));
  const noun = COLORINGS.find(([key]) => key === mode)[1];
  groups.push({ label: `every other ${noun}`, color: OTHERS_COLOR }, { label: `${noun} unknown`, color: unknown });
  return inOrder(groups, Uint8Array.from(keys, (key) => known.get(key) ?? (isUnknown(key) ? largest.length + 1 : largest.length)));
}

const inOrder = (groups, codes) => ({ groups, codes, order: groups.map((_, n) => n) });

// Which blocks belong to the chosen step and module: a byte per block, or null for all of them.
function matchingBlocks(data, { step, module }) {
  const { blocks } = data;
  if (step === null && !module) return null;
  const inModule = module ? Uint8Array.from(data.modules, (name) => Number(name === module || name.startsWith(`${module}.`))) : null;
  return Uint8Array.from(blocks.size, (_, i) => Number((step === null || blocks.step[i] === step) && (!inModule || inModule[blocks.module[i]])));
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
    shown.push({ label: matching ? "other blocks" : "blocks not on this page", color: OTHERS_COLOR, values: rest.map((bytes) => Math.max(0, bytes)) });
  }
  return shown;
}

// The layers of the curve: by category they are columns of the curve itself, exact whatever blocks the page has.
function curveLayers(data, mode, coloring, matching) {
  if (mode !== "category" || matching) return layerBlocks(data, coloring, matching);
  const columns = data.stack_order.map((code) => ({ ...data.categories[code], values: data.curve[data.categories[code].name] }));
  return columns.filter(({ values }) => values.some((bytes) => bytes > 0));
}
