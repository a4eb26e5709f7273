// Draws a tree of groups of blocks as boxes: an icicle (callers above) or a flame graph (callers below). The width of a box
// is its share of the bytes, or of the number of blocks.
const REST = -2; // node of the blocks that are not on the page

// Fills root. `act.zoom(node)` is called when the reader zooms. Returns { draw(model) }, where the model is { hierarchy, sums,
// coloring, zoom, measure ("bytes" or "count"), isFlame, highlight, rest, name }.
function mountFlame(root, colors, act) {
  const ROW = 20, MIN_WIDTH = 0.7;
  const canvas = make("canvas", { tabIndex: 0 }), tip = make("div", { className: "tooltip", hidden: true });
  const frame = make("div", { className: "flame-scroll" }, canvas), status = make("p", { className: "note tip" });
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", "Groups of blocks as boxes. Arrow keys move between boxes, Enter zooms in, Escape zooms out.");
  status.setAttribute("aria-live", "polite");
  root.replaceChildren(frame, tip, status);
  let model = null, boxes = [], focused = 0, childrenOf = null;

  const valueOf = (node) => (node === REST ? model.rest[model.measure] : model.sums[model.measure][node] + (node === 0 ? model.rest[model.measure] : 0));
  const titleOf = (node) => (node === 0 ? model.name : node === REST ? "smaller blocks that are not on this page" : model.hierarchy.title[node]);

  function children(node) { // largest first
    if (childrenOf.has(node)) return childrenOf.get(node);
    return [];
  }
  function groupChildren() {
    childrenOf = new Map();
    const { hierarchy: { parent }, sums } = model;
    for (let node = 1; node < parent.length; node++) {
      if (!sums.count[node]) continue;
      if (!childrenOf.has(parent[node])) childrenOf.set(parent[node], []);
      childrenOf.get(parent[node]).push(node);
    }
    for (const nodes of childrenOf.values()) nodes.sort((a, b) => valueOf(b) - valueOf(a) || a - b);
    if (model.rest.count) childrenOf.set(0, [...(childrenOf.get(0) ?? []), REST]);
  }

  function layOut(width) {
    const path = [], placed = [];
    for (let node = model.zoom; node > 0; node = model.hierarchy.parent[node]) path.unshift(node);
    [0, ...path].forEach((node, depth) => placed.push({ node, depth, x: 0, width, isCaller: node !== model.zoom }));
    const waiting = [placed[placed.length - 1]];
    while (waiting.length) {
      const box = waiting.pop(), total = valueOf(box.node);
      let x = box.x;
      for (const node of children(box.node)) {
        const child = { node, depth: box.depth + 1, x, width: total ? (box.width * valueOf(node)) / total : 0, isCaller: false };
        x += child.width;
        if (child.width < MIN_WIDTH) break; // children are sorted
        placed.push(child);
        if (node !== REST) waiting.push(child);
      }
    }
    return placed;
  }

  function colorOfNode(node) {
    let best = null, most = -1;
    for (const [code, bytes] of model.sums.byColor[node] ?? []) if (bytes > most) [best, most] = [code, bytes];
    return best === null ? OTHER_COLOR : model.coloring.groups[best].color;
  }
  const isMatch = (node) => node > 0 && titleOf(node).toLowerCase().includes(model.highlight);

  function draw(next) {
    model = next;
    groupChildren();
    if (focused !== REST && !model.sums.count[focused]) focused = model.zoom;
    boxes = layOut(canvas.clientWidth);
    const depth = Math.max(...boxes.map((box) => box.depth)) + 1, height = depth * ROW + 1;
    const pen = preparePen(canvas, height);
    for (const box of boxes) {
      box.y = model.isFlame ? height - (box.depth + 1) * ROW : box.depth * ROW;
      drawBox(pen, box);
    }
    if (model.isFlame) frame.scrollTop = frame.scrollHeight;
    describe(null);
  }

  function drawBox(pen, { node, x, y, width, isCaller }) {
    const color = node === REST || node === 0 ? colors().band : colorOfNode(node), inner = Math.max(width - 1, 0.5);
    const isDim = isCaller || (model.highlight && node > 0 && !isMatch(node));
    pen.globalAlpha = isDim ? 0.35 : 1;
    pen.fillStyle = color;
    pen.fillRect(x, y, inner, ROW - 1);
    drawShares(pen, node, x, y + ROW - 4, inner);
    pen.globalAlpha = 1;
    if (node === focused && document.activeElement === canvas) {
      pen.strokeStyle = colors().ink;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, inner - 2, ROW - 3);
    }
    if (width < 30) return;
    const label = node > 0 ? model.hierarchy.label[node] : titleOf(node);
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width - 4, ROW);
    pen.clip();
    pen.fillStyle = isDim || node <= 0 ? colors().ink : inkOn(color);
    pen.fillText(`${label}  ${textOfValue(node)}`, x + 5, y + ROW / 2 - 1);
    pen.restore();
  }
  // The colors of everything in a box that has several, as a line at its lower edge.
  function drawShares(pen, node, x, y, width) {
    const shares = node === REST ? null : model.sums.byColor[node];
    if (!shares || shares.size < 2) return;
    let all = 0, at = x;
    for (const bytes of shares.values()) all += bytes;
    for (const [code, bytes] of [...shares].sort((a, b) => b[1] - a[1])) {
      pen.fillStyle = model.coloring.groups[code].color;
      pen.fillRect(at, y, (width * bytes) / (all || 1), 3);
      at += (width * bytes) / (all || 1);
    }
  }

  const textOfValue = (node) => (model.measure === "bytes" ? formatBytes(valueOf(node)) : formatCount(valueOf(node), "block"));
  function sentence(node) {
    const bytes = node === REST ? model.rest.bytes : model.sums.bytes[node] + (node === 0 ? model.rest.bytes : 0);
    const count = node === REST ? model.rest.count : model.sums.count[node] + (node === 0 ? model.rest.count : 0);
    const all = valueOf(0), share = all ? `, ${formatPercent(valueOf(node) / all)}` : "";
    return `${titleOf(node)}: ${formatBytes(bytes)} in ${formatCount(count, "block")}${share}`;
  }
  // The share of all boxes that match the highlighted text; boxes within a match count with it.
  function matchedValue() {
    let sum = 0;
    const visit = (node) => { if (isMatch(node)) sum += valueOf(node); else if (node !== REST) children(node).forEach(visit); };
    visit(0);
    return sum;
  }
  function describe(node) {
    const lines = [];
    if (node !== null) lines.push(sentence(node));
    else if (model.highlight) lines.push(`Matches of “${model.highlight}”: ${formatPercent(matchedValue() / (valueOf(0) || 1))} of the ${model.measure === "bytes" ? "bytes" : "blocks"}.`);
    status.textContent = lines.join(" ");
  }

  const boxAt = (event) => boxes.find(({ x, y, width }) => event.offsetX >= x && event.offsetX < x + width && event.offsetY >= y && event.offsetY < y + ROW);
  canvas.addEventListener("mousemove", (event) => {
    const box = boxAt(event);
    tip.hidden = !box;
    if (!box) return;
    tip.textContent = sentence(box.node);
    const bounds = root.getBoundingClientRect(), left = event.clientX - bounds.left;
    tip.style.left = `${Math.max(0, Math.min(left + 12, bounds.width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - bounds.top + 16}px`;
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => { const box = boxAt(event); if (box && box.node !== REST) zoomTo(box.node); });
  for (const change of ["focus", "blur"]) canvas.addEventListener(change, () => { if (model) draw(model); });
  function zoomTo(node) {
    focused = node;
    tip.hidden = true;
    act.zoom(node);
  }
  const MOVES = {
    ArrowDown: () => move(model.isFlame ? "parent" : "child"), ArrowUp: () => move(model.isFlame ? "child" : "parent"),
    ArrowLeft: () => sibling(-1), ArrowRight: () => sibling(1),
    Enter: () => { if (focused !== REST) zoomTo(focused); }, Escape: () => zoomTo(Math.max(0, model.hierarchy.parent[model.zoom])),
  };
  const parentOf = (node) => (node === REST ? 0 : Math.max(0, model.hierarchy.parent[node]));
  const isDrawn = (node) => boxes.some((box) => box.node === node);
  function move(direction) { focus(direction === "parent" ? parentOf(focused) : children(focused)[0] ?? focused); }
  function sibling(step) {
    const nodes = children(parentOf(focused));
    focus(nodes[nodes.indexOf(focused) + step] ?? focused);
  }
  function focus(node) {
    if (isDrawn(node)) focused = node;
    draw(model);
    describe(focused);
  }
  canvas.addEventListener("keydown", (event) => {
    if (!MOVES[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    MOVES[event.key]();
  });
  return { draw };
}
