// Colors of blocks: by category, or by allocation site, module, operator, stream or size (`color` of the store). One home
// for tracks, icicles and tables. The colors themselves are those of memtrace.dashboards.palette.
const COLORINGS = [["category", "category"], ["site", "allocation site"], ["module", "module"], ["operator", "operator"],
  ["stream", "stream"], ["size", "size"]];
const SIZE_STEPS = [0, 64 * 2 ** 10, 2 ** 20, 16 * 2 ** 20, 256 * 2 ** 20]; // smallest bytes of each color
const OTHER_COLOR = "#b9c0c7";
const colorings = new WeakMap(); // data -> map of the mode -> coloring

// The groups of blocks that have a color each: { groups, codeOfKind, codes, order }. Groups are { label, color, term }, the
// term is the filter that finds the blocks (null: none does); codes are the index of the group by kind and by block;
// `order` are the groups as stacked, bottom to top.
function coloringOf(data, mode = chosenColoring(data)) {
  if (!colorings.has(data)) colorings.set(data, new Map());
  const known = colorings.get(data);
  if (!known.has(mode)) {
    const { groups, codeOfKind, order } = makeColoring(data, mode);
    const codes = Uint8Array.from(data.blocks.kind, (kind) => codeOfKind[kind]);
    known.set(mode, { groups, codeOfKind, codes, order: order ?? groups.map((_, code) => code) });
  }
  return known.get(mode);
}

// CSS color of the block with an index.
function colorOf(data, i) {
  const { groups, codes } = coloringOf(data);
  return groups[codes[i]].color;
}

// What the reader chose; else the category, or the allocation site or size where most bytes at the peak have none.
function chosenColoring(data) {
  const { color } = store.get();
  return COLORINGS.some(([name]) => name === color) ? color : defaultColoring(data);
}

const defaults = new WeakMap();
function defaultColoring(data) {
  if (!defaults.has(data)) {
    const { blocks, siteOfKind } = data, unknown = data.categories.findIndex((category) => category.name === "unknown");
    let bytes = 0, inCategory = 0, atSite = 0;
    for (const i of liveAt(blocks, data.peak.row)) {
      bytes += blocks.size[i];
      if (blocks.category[i] !== unknown) inCategory += blocks.size[i];
      if (data.sites[siteOfKind[blocks.kind[i]]]) atSite += blocks.size[i];
    }
    defaults.set(data, inCategory * 2 >= bytes ? "category" : atSite * 2 >= bytes ? "site" : "size");
  }
  return defaults.get(data);
}

function makeColoring(data, mode) {
  const { kinds } = data;
  if (mode === "category") {
    const groups = data.categories.map(({ label, color }) => ({ label, color, term: ["category", label] }));
    return { groups, codeOfKind: Uint8Array.from(kinds.category), order: data.stack_order };
  }
  if (mode === "size") {
    const groups = SIZE_STEPS.map((low, step) => {
      const high = SIZE_STEPS[step + 1];
      return { label: !low ? `below ${formatBytes(high)}` : high ? `${formatBytes(low)} to ${formatBytes(high)}` : `${formatBytes(low)} or more`, color: data.size_colors[step], term: null };
    });
    return { groups, codeOfKind: Uint8Array.from(kinds.size, (bytes) => SIZE_STEPS.filter((low) => low <= bytes).length - 1) };
  }
  const field = blockFields(data)[mode], numKinds = kinds.size.length;
  const texts = Array.from({ length: numKinds }, (_, k) => (mode === "module" ? modulePattern(field.ofKind(k)) : field.ofKind(k)));
  return colorTexts(data, texts, field.label, mode === "module" ? null : mode);
}

// The texts with the most bytes, weighted by how long the blocks live, have a color each; the others share one.
function colorTexts(data, texts, noun, field) {
  const { blocks } = data, weight = new Map(), palette = data.series_colors;
  for (let i = 0; i < blocks.kind.length; i++) {
    const text = texts[blocks.kind[i]], share = (blocks.end_row[i] - blocks.begin_row[i]) / (data.num_rows + 1);
    weight.set(text, (weight.get(text) ?? 0) + blocks.size[i] * share);
  }
  const largest = [...weight.keys()].filter(Boolean).sort((a, b) => weight.get(b) - weight.get(a)).slice(0, palette.length);
  const colors = assignColors(largest, palette), codeOf = new Map(largest.map((text, code) => [text, code]));
  const groups = largest.map((text) => ({ label: text, color: colors.get(text), term: field && [field, text] }));
  const unknown = data.categories[data.categories.length - 1].color;
  groups.push({ label: `every other ${noun}`, color: OTHER_COLOR, term: null }, { label: `no ${noun}`, color: unknown, term: field && [field, ""] });
  return { groups, codeOfKind: Uint8Array.from(texts, (text) => (text ? codeOf.get(text) ?? largest.length : largest.length + 1)) };
}

// The layers of a stack have one color: GPT.blocks.3.mlp is GPT.blocks.*.mlp.
const modulePattern = (module) => module.split(".").map((part) => (/^\d+$/.test(part) ? "*" : part)).join(".");

// Every text has its color on every page, unless a larger text of the page already has the same one.
function assignColors(texts, palette) {
  const taken = new Set(), colors = new Map();
  for (const text of texts) {
    let slot = hashText(text) % palette.length;
    while (taken.has(slot)) slot = (slot + 1) % palette.length;
    taken.add(slot);
    colors.set(text, palette[slot]);
  }
  return colors;
}

function hashText(text) { // FNV-1a
  let hash = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193) >>> 0;
  return hash;
}

// Black or white, whichever has more contrast with a color #rrggbb.
function inkOn(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const value = parseInt(color.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}
