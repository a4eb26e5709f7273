// The explorer: finds, groups, searches and sorts the blocks of an instant or of a range, and shows one in full.
// Rows are rows of the events table. Text from a trace enters the document only through textContent and fillText.

// Indices of the blocks that are live after a row.
function liveAt(blocks, row) {
  const live = [];
  for (let i = 0; i < blocks.size.length && blocks.begin_row[i] <= row; i++) if (blocks.end_row[i] > row) live.push(i);
  return live;
}

// Indices of the blocks that are allocated after the row `first` until the row `last`, all or those still live after it.
function allocatedIn(blocks, first, last, onlyLive) {
  const found = [];
  for (let i = 0; i < blocks.size.length && blocks.begin_row[i] <= last; i++) {
    if (blocks.begin_row[i] > first && (!onlyLive || blocks.end_row[i] > last)) found.push(i);
  }
  return found;
}

// The tree of groups of some blocks: each node has a key, its bytes (also by category), its number of blocks, and
// children by key.
function groupBlocks(indices, blocks, pathOf) {
  const newNode = (key) => ({ key, bytes: 0, count: 0, byCategory: [], children: new Map() });
  const root = newNode("");
  for (const i of indices) {
    const size = blocks.size[i], category = blocks.category[i];
    const add = (node) => {
      node.bytes += size;
      node.byCategory[category] = (node.byCategory[category] ?? 0) + size;
      node.count++;
    };
    let node = root;
    add(node);
    for (const key of pathOf(i)) {
      if (!node.children.has(key)) node.children.set(key, newNode(key));
      node = node.children.get(key);
      add(node);
    }
  }
  return root;
}

// Fills root with the explorer of the data of a view. Returns a function that draws it again, for another theme.
function mountExplorer(root, data, store, colors) {
  const ROW = 22, PAGE = 100, MAX_DEPTH = 40;
  const { blocks } = data;
  const text = {
    name: (i) => data.names[blocks.name[i]] || data.modules[blocks.module[i]],
    category: (i) => data.categories[blocks.category[i]].label,
    operator: (i) => data.operators[blocks.operator[i]],
    module: (i) => data.modules[blocks.module[i]],
    site: (i) => data.sites[blocks.site[i]],
  };
  const stackPath = new Map(); // outermost frame first
  for (const [stack, frames] of Object.entries(data.stacks)) {
    stackPath.set(Number(stack), frames.map((frame) => data.frames[frame].text).reverse());
  }
  const paths = {
    module: (i) => (text.module(i) || "(no module)").split("."),
    stack: (i) => stackPath.get(blocks.stack[i]) ?? ["(no call stack on this page)"],
    site: (i) => [text.site(i) || "(no call stack)"],
    category: (i) => [text.category(i)],
    operator: (i) => [text.operator(i) || "(no operator)"],
  };
  const COLUMNS = [ // title, value to sort by, text of the cell, class
    ["size", (i) => blocks.size[i], (i) => formatBytes(blocks.size[i]), "number"],
    ["category", text.category, text.category, "category"],
    ["tensor or module", text.name, text.name, "code"],
    ["operator", text.operator, text.operator, "code"],
    ["allocation site", text.site, text.site, "code"],
    ["step", (i) => blocks.step[i], (i) => (blocks.step[i] < 0 ? "" : String(blocks.step[i])), "number"],
    ["allocated", (i) => blocks.begin_row[i], (i) => formatTime(blocks.begin_us[i]), "number"],
    ["live for", (i) => lifetime(i), (i) => formatTime(lifetime(i)), "number"],
  ];
  const DEFAULT_GROUP = data.modules.some(Boolean) ? "module" : "site";
  const local = { sort: 0, descending: true, zoom: [], shown: PAGE };
  // What the state of the page means here.
  function chosen() {
    const { show, at, group, search, block } = store.get();
    return { mode: show ?? "instant", row: clampRow(at ?? data.peak.row), group: paths[group] ? group : DEFAULT_GROUP,
      query: (search ?? "").trim(), block: block ?? -1 };
  }
  const clampRow = (row) => Math.min(Math.max(Math.round(row), -1), data.num_rows - 1);

  // The last parts of the path are enough to recognise a file; the title of the line has all of it.
  const shortFrame = (frame) => frame.replace(/^\S*\/((?:[^/\s]+\/){2}[^/\s]+:\d+ )/, "…/$1");
  function lifetime(i) {
    return blocks.end_us[i] < 0 || blocks.begin_us[i] < 0 ? -1 : blocks.end_us[i] - blocks.begin_us[i];
  }
  // Elements.
  const search = make("input", { type: "search", placeholder: "Search names, operators, lines", size: 30 });
  search.setAttribute("aria-label", "Search blocks");
  const modeChoice = makeChoice("Show", [["instant", "blocks live at the instant"], ["range", "allocated in the visible range"],
    ["kept", "allocated in the visible range and live at its end"]], chosen().mode, (show) => store.set({ show }, { push: true }));
  const groupChoice = makeChoice("Group by", [["module", "module"], ["site", "allocation site"], ["stack", "call stack"],
    ["category", "category"], ["operator", "operator"]], chosen().group, (group) => store.set({ group }, { push: true }));
  const tools = make("div", { className: "tools" }, modeChoice, groupChoice, search,
    makeButton("Peak", () => showInstant(data.peak.row)), makeButton("◀ event", () => showInstant(neighbour(-1))),
    makeButton("event ▶", () => showInstant(neighbour(1))));
  const headline = make("p", { className: "headline" });
  headline.setAttribute("aria-live", "polite");
  const crumbs = make("p", { className: "crumbs" });
  const canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Groups of blocks; width shows bytes. Click a group to zoom in.");
  const tip = make("p", { className: "note tip" });
  const table = make("table"), more = makeButton("Show more", () => { local.shown += PAGE; drawTable(selection()); });
  const detail = make("div", { className: "detail" });
  root.replaceChildren(tools, headline, crumbs, canvas, tip, make("div", { className: "split" },
    make("div", { className: "scroll" }, table, more), detail));

  // Selection.
  function range() { // rows of the visible range
    const { from, to } = store.get();
    return from === null ? [-1, data.num_rows] : [data.rowAt(from), data.rowAt(to)];
  }
  let matchedQuery = null, matches = null;
  function matcher(query) { // a function that tells whether a block contains all words
    if (!query) return () => true;
    if (matchedQuery !== query) {
      matchedQuery = query;
      const words = query.toLowerCase().split(/\s+/).filter(Boolean);
      const match = (texts) => texts.map((value) => { const low = value.toLowerCase(); return words.map((word) => low.includes(word)); });
      const tables = { name: match(data.names), module: match(data.modules), operator: match(data.operators),
        site: match(data.sites), category: match(data.categories.map((category) => category.label)) };
      matches = (block) => words.every((_, w) => Object.keys(tables).some((key) => tables[key][blocks[key][block]][w]));
    }
    return matches;
  }
  function selection() {
    const { mode, row, group, query } = chosen(), isMatch = matcher(query), pathOf = paths[group];
    const indices = mode === "instant" ? liveAt(blocks, row) : allocatedIn(blocks, ...range(), mode === "kept");
    const inZoom = (i) => { const path = local.zoom.length ? pathOf(i) : []; return local.zoom.every((key, depth) => path[depth] === key); };
    return indices.filter((i) => isMatch(i) && inZoom(i));
  }
  function neighbour(direction) {
    const { row: current } = chosen();
    let best = direction > 0 ? data.num_rows - 1 : -1;
    for (const column of [blocks.begin_row, blocks.end_row]) {
      for (const row of column) if (direction > 0 ? row > current && row < best : row < current && row > best) best = row;
    }
    return best;
  }

  // Drawing.
  let boxes = [];
  function drawIcicle(indices) {
    const tree = groupBlocks(indices, blocks, paths[chosen().group]);
    let node = tree;
    for (const key of local.zoom) node = node?.children.get(key);
    boxes = [];
    const place = (entry, path, depth, start, share) => {
      boxes.push({ path, depth, start, share, entry });
      if (depth >= MAX_DEPTH) return;
      let at = start;
      for (const child of [...entry.children.values()].sort((a, b) => b.bytes - a.bytes)) {
        const width = share * (child.bytes / (entry.bytes || 1));
        if (width * canvas.clientWidth >= 1) place(child, [...path, child.key], depth + 1, at, width);
        at += width;
      }
    };
    if (node?.bytes) place(node, [...local.zoom], 0, 0, 1);
    const depth = Math.max(1, ...boxes.map((box) => box.depth + 1)), ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = `${depth * ROW}px`;
    canvas.width = width * ratio;
    canvas.height = depth * ROW * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const box of boxes) {
      const x = box.start * width, w = box.share * width, y = box.depth * ROW;
      pen.fillStyle = box.depth % 2 ? colors().band : colors().rule;
      pen.fillRect(x, y, Math.max(w - 1, 0.5), ROW - 1);
      drawShares(pen, box.entry, x, y + ROW - 4, Math.max(w - 1, 0.5));
      if (w < 40) continue;
      const label = `${box.path[box.path.length - 1] ?? "all"}  ${formatBytes(box.entry.bytes)}`;
      pen.save();
      pen.beginPath();
      pen.rect(x, y, w - 4, ROW);
      pen.clip();
      pen.fillStyle = colors().ink;
      pen.fillText(label, x + 5, y + ROW / 2);
      pen.restore();
    }
    crumbs.replaceChildren();
    if (local.zoom.length) {
      crumbs.append(makeButton("all", () => zoomTo([])));
      local.zoom.forEach((key, depth) => crumbs.append(" › ", makeButton(key, () => zoomTo(local.zoom.slice(0, depth + 1)))));
    }
  }
  function drawShares(pen, entry, x, y, width) { // a line in the colors of the categories
    let at = x;
    data.categories.forEach(({ color }, category) => {
      const part = (width * (entry.byCategory[category] ?? 0)) / entry.bytes;
      pen.fillStyle = color;
      pen.fillRect(at, y, part, 3);
      at += part;
    });
  }
  const boxAt = (event) => {
    const x = event.offsetX / canvas.clientWidth, depth = Math.floor(event.offsetY / ROW);
    return boxes.find((box) => box.depth === depth && box.start <= x && x < box.start + box.share);
  };
  function zoomTo(path) { local.zoom = path; local.shown = PAGE; update(); }

  function drawTable(indices) {
    const value = COLUMNS[local.sort][1], sign = local.descending ? -1 : 1;
    const ordered = [...indices].sort((a, b) => {
      const one = value(a), other = value(b);
      return (one < other ? -sign : one > other ? sign : 0) || a - b;
    });
    const head = make("tr", {}, ...COLUMNS.map(([title, , , kind], column) => {
      const cell = make("th", { scope: "col", className: kind }, makeButton(title, () => {
        local.descending = local.sort === column ? !local.descending : kind === "number";
        local.sort = column;
        drawTable(indices);
      }));
      cell.ariaSort = local.sort !== column ? "none" : local.descending ? "descending" : "ascending";
      return cell;
    }));
    const rows = ordered.slice(0, local.shown).map((i) => {
      const row = make("tr", { tabIndex: 0 }, ...COLUMNS.map(([, , show, kind]) => {
        const shown = show(i) || "–";
        const cell = make("td", { className: kind });
        if (kind === "category") cell.append(swatch(i), shown);
        else cell.append(kind === "code" ? make("code", { textContent: shown }) : shown);
        return cell;
      }));
      row.dataset.block = String(blocks.block[i]);
      row.addEventListener("click", () => store.set({ block: blocks.block[i] }, { push: true }));
      row.addEventListener("keydown", (event) => { if (event.key === "Enter") store.set({ block: blocks.block[i] }, { push: true }); });
      if (blocks.block[i] === chosen().block) row.classList.add("chosen");
      return row;
    });
    table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
    more.hidden = ordered.length <= local.shown;
    more.textContent = `Show more (${(ordered.length - local.shown).toLocaleString("en-US")} left)`;
  }
  function swatch(i) {
    const made = make("span", { className: "swatch" });
    made.style.background = data.categories[blocks.category[i]].color;
    return made;
  }

  function drawBlock() {
    const i = blocks.block.indexOf(chosen().block);
    detail.hidden = i < 0;
    if (i < 0) return;
    const facts = [["size", `${formatBytes(blocks.size[i])} (${blocks.size[i].toLocaleString("en-US")} bytes)`],
      ["category", text.category(i)], ["tensor", data.names[blocks.name[i]]], ["module", text.module(i)], ["operator", text.operator(i)],
      ["phase", data.phases[blocks.phase[i]]], ["step", blocks.step[i] < 0 ? "" : String(blocks.step[i])],
      ["allocated", blocks.begin_row[i] < 0 ? "before the trace" : `event ${blocks.begin_row[i]}, ${formatTime(blocks.begin_us[i])}`],
      ["freed", blocks.end_row[i] >= data.num_rows ? "not in the trace" : `event ${blocks.end_row[i]}, ${formatTime(blocks.end_us[i])}`],
      ["accesses", !data.has_accesses ? "not recorded" : `${formatCount(blocks.num_reads[i], "read")}, ${formatCount(blocks.num_writes[i], "write")}`]];
    const frames = (data.stacks[blocks.stack[i]] ?? []).map((frame) => data.frames[frame]);
    detail.replaceChildren(make("h3", { textContent: `Block ${blocks.block[i]}` }),
      make("dl", {}, ...facts.filter(([, value]) => value).map(([term, value]) =>
        make("div", {}, make("dt", { textContent: term }), make("dd", { textContent: value })))),
      frames.length ? make("ol", {}, ...frames.map((frame) =>
        make("li", { className: frame.own ? "own" : "", title: frame.text }, make("code", { textContent: shortFrame(frame.text) }))))
        : make("p", { className: "note", textContent: "The page has no call stack of this block." }));
  }

  function describe(indices) {
    let bytes = 0;
    for (const i of indices) bytes += blocks.size[i];
    const what = `${formatBytes(bytes)} in ${formatCount(indices.length, "block")}`;
    const { mode, row } = chosen();
    if (mode !== "instant") {
      return mode === "range" ? `Allocated in the visible range: ${what}.` : `Allocated in the visible range and live at its end: ${what}.`;
    }
    return row < 0 ? `Live at the start: ${what}.` : `Live after event ${row.toLocaleString("en-US")} (${formatTime(data.timeOfRow(row))}): ${what}.`;
  }

  function update() {
    const { mode, group, query } = chosen(), indices = selection();
    modeChoice.querySelector("select").value = mode;
    groupChoice.querySelector("select").value = group;
    if (search !== document.activeElement) search.value = query;
    headline.textContent = describe(indices);
    root.dataset.bytes = String(indices.reduce((sum, i) => sum + blocks.size[i], 0));
    root.dataset.count = String(indices.length);
    drawIcicle(indices);
    drawTable(indices);
    drawBlock();
  }
  const showInstant = (at) => store.set({ show: null, at: clampRow(at) }, { push: true });

  canvas.addEventListener("click", (event) => { const box = boxAt(event); if (box) zoomTo(box.path); });
  canvas.addEventListener("mousemove", (event) => {
    const box = boxAt(event);
    tip.textContent = box
      ? `${box.path.join(" › ") || "all"}: ${formatBytes(box.entry.bytes)} in ${formatCount(box.entry.count, "block")}` : "";
  });
  search.addEventListener("input", () => store.set({ search: search.value.trim() || null }));
  new ResizeObserver(() => drawIcicle(selection())).observe(root);
  store.subscribe((state, changed) => {
    if (changed.includes("group") || changed.includes("show")) local.zoom = [];
    if (changed.includes("section") || changed.includes("view")) return;
    if (chosen().mode === "instant" && changed.every((key) => key === "from" || key === "to")) return;
    if (!changed.includes("block")) local.shown = PAGE;
    update();
  });
  update();
  return update;
}
