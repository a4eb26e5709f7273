// Colors of blocks: by category, or by allocation site, module, operator, stream or size (`color` of the store). One home
// for the block tables, icicles and tracks. The colors themselves are those of memtrace.dashboards.palette.

const COLOR_CHOICES = [["category", "category"], ["site", "allocation site"], ["module", "module"], ["operator", "operator"],
  ["stream", "stream"], ["size", "size"]];
const SIZE_STEPS = [0, 4 * 1024, 64 * 1024, 1024 ** 2, 16 * 1024 ** 2, 256 * 1024 ** 2]; // smallest bytes of each class
const NO_COLOR = "#8c9299"; // unknown
const colorings = new WeakMap(); // data -> map of `color` -> coloring

// The classes of blocks that have a color each, most bytes first, and the class of each kind of block:
// { classes: [{ label, color, term }], classOfKind }. `term` is the query of the class; null: none.
function coloringOf(data, by = chosenColor(data)) {
  if (!colorings.has(data)) colorings.set(data, new Map());
  const known = colorings.get(data);
  if (!known.has(by)) known.set(by, makeColoring(data, by));
  return known.get(by);
}

// CSS color of the block with an index.
function colorOf(data, i) {
  const { classes, classOfKind } = coloringOf(data);
  return classes[classOfKind[data.blocks.kind[i]]].color;
}

// The choice of the reader; else by category, or by allocation site where most bytes at the peak are of unknown category.
function chosenColor(data) {
  const { color } = store.get();
  if (COLOR_CHOICES.some(([name]) => name === color)) return color;
  return defaultColor(data);
}

const defaultColors = new WeakMap();
function defaultColor(data) {
  if (!defaultColors.has(data)) {
    const unknown = data.categories.findIndex((category) => category.name === "unknown");
    let bytes = 0, unknownBytes = 0;
    for (const i of liveAt(data.blocks, data.peak.row)) {
      bytes += data.blocks.size[i];
      if (data.blocks.category[i] === unknown) unknownBytes += data.blocks.size[i];
    }
    defaultColors.set(data, unknownBytes * 2 > bytes && data.sites.some(Boolean) ? "site" : "category");
  }
  return defaultColors.get(data);
}

function makeColoring(data, by) {
  const { kinds } = data, numKinds = kinds.size.length, fields = blockFields(data);
  if (by === "category") {
    const classes = data.categories.map(({ label, color }) => ({ label, color, term: { field: "category", value: label } }));
    return { classes, classOfKind: Uint16Array.from(kinds.category) };
  }
  if (by === "size") {
    const classes = SIZE_STEPS.map((low, step) => {
      const high = SIZE_STEPS[step + 1];
      return { label: high ? `below ${formatBytes(high)}` : `${formatBytes(low)} or more`, color: data.size_colors[step], term: null };
    });
    return { classes, classOfKind: Uint16Array.from(kinds.size, (bytes) => SIZE_STEPS.findLastIndex((low) => low <= bytes)) };
  }
  const textOf = by === "module" ? (k) => modulePattern(fields.module.ofKind(k)) : fields[by].ofKind;
  const texts = Array.from({ length: numKinds }, (_, k) => textOf(k));
  const bytes = new Map(texts.map((text) => [text, 0]));
  for (let i = 0; i < data.blocks.size.length; i++) {
    const text = texts[data.blocks.kind[i]];
    bytes.set(text, bytes.get(text) + data.blocks.size[i]);
  }
  const ordered = [...bytes.keys()].sort((a, b) => bytes.get(b) - bytes.get(a) || (a < b ? -1 : 1));
  const colors = assignColors(ordered.filter(Boolean), data.class_colors), index = new Map(ordered.map((text, k) => [text, k]));
  const classes = ordered.map((text) => ({
    label: text || `no ${fields[by].label}`, color: text ? colors.get(text) : NO_COLOR,
    term: by === "module" ? null : { field: by, value: text },
  }));
  return { classes, classOfKind: Uint16Array.from(texts, (text) => Math.min(index.get(text), 65535)) };
}

// The layers of a stack have one color: GPT.blocks.3.mlp is GPT.blocks.*.mlp.
const modulePattern = (module) => module.split(".").map((part) => (/^\d+$/.test(part) ? "*" : part)).join(".");

// A text has the same color on every page, except where two of the largest texts would share one.
function assignColors(texts, palette) {
  const taken = new Set(), colors = new Map();
  for (const text of texts) {
    let slot = hashText(text) % palette.length;
    if (taken.size < palette.length) while (taken.has(slot)) slot = (slot + 1) % palette.length;
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
