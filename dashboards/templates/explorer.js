// The explorer: the blocks of an instant or of a range, filtered, as an icicle or flame graph and as a table, and one block in
// full. Everything that is chosen is in the store.
const EXPLORER_CHOICES = ["show", "at", "step", "module", "search", "brush"]; // change which blocks are listed
const PICTURE_CHOICES = ["group", "zoom", "frames", "measure", "graph", "highlight", "color"];

// Fills root with the explorer of the data of a view. Returns a function that draws it again, for another theme.
function mountExplorer(root, data, store, colors) {
  const { blocks } = data, fields = blockFields(data), select = createSelector(data);
  const firstGroup = data.modules.some(Boolean) ? "module" : data.stacks.node.some(Boolean) ? "stack" : "operator";
  const hasOwnFrames = data.frames.owner.some((owner) => owner === OWN);
  const local = { selection: null, indices: [], sums: null };
  const goTo = (at) => store.set({ show: null, at, zoom: null }, { push: true });
  const open = (i) => store.set({ block: blocks.block[i] }, { push: true });
  const choices = () => {
    const { group, frames, measure, graph, highlight, zoom } = store.get();
    return { group: GROUPS.some(([name]) => name === group) ? group : firstGroup, onlyOwn: frames ? frames === "own" : hasOwnFrames,
      measure: measure === "count" ? "count" : "bytes", isFlame: graph === "flame", highlight: (highlight ?? "").trim().toLowerCase(), zoom: zoom ?? 0 };
  };

  // Elements.
  const filters = mountFilters(data, store, goTo);
  const filterBy = (field, i) => {
    const { ofKind, ofBlock } = fields[field];
    if (field === "step") store.set({ step: blocks.step[i], at: local.selection.row }, { push: true });
    else if (field === "module") store.set({ module: fields.module.ofKind(blocks.kind[i]) }, { push: true });
    else filters.addTerm(field, String(ofKind ? ofKind(blocks.kind[i]) : ofBlock(i)));
  };
  const headline = make("p", { className: "headline" });
  headline.setAttribute("aria-live", "polite");
  const choose = (label, key, options) => makeChoice(label, options, "", (value) => store.set({ [key]: value, ...(key === "group" || key === "frames" ? { zoom: null } : {}) }, { push: true }));
  const selects = { group: choose("Group by", "group", GROUPS), frames: choose("Frames", "frames", [["own", "own code"], ["all", "all"]]),
    measure: choose("Width", "measure", [["bytes", "bytes"], ["count", "blocks"]]),
    graph: choose("Draw as", "graph", [["icicle", "icicle"], ["flame", "flame graph"]]), color: choose("Color", "color", COLORINGS) };
  const highlight = make("input", { type: "search", placeholder: "Highlight", size: 16 });
  highlight.setAttribute("aria-label", "Highlight boxes that contain a text");
  highlight.addEventListener("input", () => store.set({ highlight: highlight.value || null }));
  const crumbs = make("p", { className: "crumbs" }), picture = make("div", { className: "flame" }), legend = make("ul", { className: "legend" });
  const list = make("div", { className: "list" }), detail = make("div", { className: "detail" });
  const tableTools = make("div", { className: "tools" }, makeButton("Save as CSV", saveTable, "Save the listed blocks"));
  const split = make("div", { className: "split" }, make("div", {}, list, tableTools), detail);
  root.replaceChildren(filters.element, headline, make("div", { className: "tools" }, ...Object.values(selects), highlight), crumbs, picture, legend, split);

  const flame = mountFlame(picture, colors, { zoom: zoomTo });
  const showBlock = mountDetail(detail, data, { open, goTo, filter: filterBy, close: () => store.set({ block: null }, { push: true }) });
  const column = (key, title, kind, text, field = fields[key], filter = null) => ({ key, title, kind, text, field, filter });
  const ofKind = (key) => (i) => fields[key].ofKind(blocks.kind[i]);
  const hasValues = (key) => { // snapshots know neither tensors nor steps
    if (key === "name") return data.names.some(Boolean) || data.modules.some(Boolean);
    return key === "step" ? data.steps.index.length > 0 : key === "operator" ? data.operators.some(Boolean) : true;
  };
  const tensor = { ofKind: (k) => fields.name.ofKind(k) || fields.module.ofKind(k) };
  const table = mountTable(list, data, [
    column("size", "size", "number", (i) => formatBytes(blocks.size[i])),
    column("category", "category", "category", ofKind("category"), fields.category, "category"),
    column("name", "tensor or module", "code", (i) => tensor.ofKind(blocks.kind[i]), tensor),
    column("operator", "operator", "code", ofKind("operator"), fields.operator, "operator"),
    column("site", "allocation site", "code", ofKind("site"), fields.site, "site"),
    column("step", "step", "number", (i) => (blocks.step[i] < 0 ? "" : String(blocks.step[i])), fields.step, "step"),
    column("time", "allocated", "number", (i) => formatTime(blocks.begin_us[i]), { ofBlock: (i) => blocks.begin_row[i] }),
    column("lifetime", "live for", "number", (i) => formatTime(lifetimeOf(blocks, i)), fields.lifetime),
  ].filter(({ key }) => hasValues(key)), { open, filter: filterBy, swatch: (i) => colorOf(data, i) });

  // Drawing.
  function updateBlocks() {
    local.selection = describeSelection(data, store.get());
    local.indices = select(local.selection);
    const kindCounts = new Float64Array(data.kinds.size.length);
    let bytes = 0;
    for (const i of local.indices) { kindCounts[blocks.kind[i]]++; bytes += blocks.size[i]; }
    filters.update(local.selection, kindCounts);
    headline.textContent = sentence(bytes, local.indices.length);
    Object.assign(root.dataset, { bytes: String(bytes), count: String(local.indices.length), row: String(local.selection.row) });
    table.show(local.indices);
    updatePicture();
  }

  function updatePicture() {
    const { group, onlyOwn, measure, isFlame, highlight: part, zoom } = choices();
    const hierarchy = hierarchyOf(data, group, onlyOwn), coloring = coloringOf(data);
    const sums = sumTree(data, hierarchy, local.indices, coloring);
    const values = { group, frames: onlyOwn ? "own" : "all", measure, graph: isFlame ? "flame" : "icicle", color: chosenColoring(data) };
    for (const [key, label] of Object.entries(selects)) label.querySelector("select").value = values[key];
    selects.frames.hidden = group !== "stack" && group !== "callee";
    if (highlight !== document.activeElement) highlight.value = store.get().highlight ?? "";
    const chosen = group === "module" && local.selection.module !== null ? hierarchy.title.indexOf(local.selection.module) : zoom;
    const node = chosen > 0 && chosen < hierarchy.parent.length && sums.count[chosen] ? chosen : 0;
    const rest = leftOutOf(data, local.selection) ?? { bytes: 0, count: 0 };
    flame.draw({ hierarchy, sums, coloring, zoom: node, measure, isFlame, highlight: part, rest, name: SHOWN.find(([name]) => name === local.selection.show)[1] });
    drawCrumbs(hierarchy, node);
    drawLegend(coloring, sums.byColor[0] ?? new Map());
  }

  function zoomTo(node) {
    const { group, onlyOwn } = choices(), hierarchy = hierarchyOf(data, group, onlyOwn);
    // The module is a filter of the whole page; other groups only zoom the picture.
    const isModule = group === "module" && hierarchy.title[node] !== OUTSIDE_MODULES;
    store.set(isModule ? { module: node ? hierarchy.title[node] : null, zoom: null } : { zoom: node || null }, { push: true });
  }
  function drawCrumbs({ parent, label, title }, node) {
    const path = [];
    for (let at = node; at > 0; at = parent[at]) path.unshift(at);
    crumbs.replaceChildren();
    if (path.length) crumbs.append(makeButton("all", () => zoomTo(0)), ...path.flatMap((at) => [" › ", makeButton(label[at], () => zoomTo(at), title[at])]));
  }
  function drawLegend({ groups }, bytesByColor) {
    const used = [...bytesByColor].sort((a, b) => b[1] - a[1]);
    legend.replaceChildren(...used.map(([code, bytes]) => {
      const { label, color, term } = groups[code], swatch = make("span", { className: "swatch" });
      swatch.style.background = color;
      const text = [swatch, make("span", { textContent: `${label}: ${formatBytes(bytes)}` })];
      if (!term) return make("li", {}, ...text);
      const button = makeButton("", () => filters.addTerm(...term), `Show only blocks with this ${fields[term[0]].label}`);
      button.replaceChildren(...text);
      return make("li", {}, button);
    }));
  }

  function sentence(bytes, count) {
    const { show, row, range } = local.selection, isFiltered = local.selection.terms.length || local.selection.step !== null || local.selection.module !== null;
    const what = `${formatBytes(bytes)} in ${formatCount(count, "block")}${isFiltered ? (count === 1 ? " that matches" : " that match") + " the filters" : ""}`;
    const rest = leftOutOf(data, local.selection), numLeftOut = data.num_blocks - blocks.size.length;
    const more = !numLeftOut ? "" : rest ? `, and ${rest.isExact ? "" : "about "}${formatBytes(rest.bytes)} in ${formatCount(rest.count, "smaller block")} that this page leaves out`
      : `, without ${formatCount(numLeftOut, "smaller block")} of the recording that this page leaves out`;
    if (show === "instant") return row < 0 ? `Live at the start: ${what}${more}.` : `Live after ${data.eventText(row)} (${formatTime(data.timeOfRow(row))}): ${what}${more}.`;
    const where = range[0] === -Infinity ? "the recording" : `the range from ${formatTime(range[0])} to ${formatTime(range[1])}`;
    return `${{ range: "Allocated in", churn: "Allocated and freed within", kept: "Allocated and not freed in" }[show]} ${where}: ${what}${more}.`;
  }
  function showChosenBlock() {
    const i = indexOfBlock(blocks, store.get().block);
    split.classList.toggle("with-detail", i >= 0);
    table.mark(i);
    showBlock(i);
  }
  function saveTable() {
    const rows = Array.from(table.ordered(), (i) => [blocks.block[i], blocks.size[i], ...["category", "name", "module", "operator", "site", "phase"].map((key) => ofKind(key)(i)),
      blocks.step[i] < 0 ? "" : blocks.step[i], blocks.begin_us[i] < 0 ? "" : blocks.begin_us[i], blocks.end_us[i] < 0 ? "" : blocks.end_us[i]]);
    saveCsv("blocks.csv", ["block", "size_bytes", "category", "tensor", "module", "operator", "site", "phase", "step", "allocated_us", "freed_us"], rows);
  }

  let isWaiting = false; // zooming changes the range many times a second
  function updateSoon() {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => { isWaiting = false; updateBlocks(); });
  }
  new ResizeObserver(() => { updatePicture(); table.redraw(); }).observe(root);
  store.subscribe((state, changed) => {
    if (changed.includes("view")) return;
    const isRange = local.selection.show !== "instant";
    if (changed.some((key) => EXPLORER_CHOICES.includes(key))) updateBlocks();
    else if (isRange && changed.some((key) => key === "from" || key === "to")) updateSoon();
    else if (changed.some((key) => PICTURE_CHOICES.includes(key))) { updatePicture(); table.redraw(); }
    if (changed.includes("block")) showChosenBlock();
  });
  updateBlocks();
  showChosenBlock();
  return () => { updatePicture(); table.redraw(); };
}
