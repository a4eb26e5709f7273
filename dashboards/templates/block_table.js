// The table of blocks: sorted by any column. Only the rows in sight are in the document, so that 500,000 blocks are no more
// work than 50.

// Some blocks in the order of a field; blocks of equal value stay in the order of their allocation.
function sortBlocks(indices, field, isDescending, kindOf, numKinds) {
  const count = indices.length, sign = isDescending ? -1 : 1;
  const kindRanks = field.ofKind && rankValues(Array.from({ length: numKinds }, (_, k) => field.ofKind(k)));
  const ranks = kindRanks ? Float64Array.from(indices, (i) => kindRanks[kindOf[i]]) : rankNumbers(Float64Array.from(indices, field.ofBlock));
  // One number per block, of its rank and its place, sorts quicker than a comparing function.
  const keys = ranks.map((rank, place) => sign * rank * count + place).sort();
  return Uint32Array.from(keys, (key) => indices[((key % count) + count) % count]);
}

function rankValues(values) { // texts or numbers; equal values have equal ranks
  const distinct = [...new Set(values)].sort((a, b) => (a < b ? -1 : a > b ? 1 : 0));
  const ranks = new Map(distinct.map((value, rank) => [value, rank]));
  return values.map((value) => ranks.get(value));
}

function rankNumbers(values) {
  const distinct = Float64Array.from(values).sort().filter((value, place, sorted) => place === 0 || value !== sorted[place - 1]);
  return values.map((value) => lowerBound(distinct, value));
}

// Fills root. `columns` are { title, key, field, text(i), kind, filter }: `filter` is the name of the field that a cell filters
// by. `act.open(i)` is called for a chosen row, `act.filter(field, value)` for a chosen cell, `act.swatch(i)` gives a color.
// Returns { show(indices), mark(i), redraw() }.
function mountTable(root, data, columns, act) {
  const ROW = 28, EXTRA = 6, { kind } = data.blocks, numKinds = data.kinds.size.length;
  const state = { indices: [], ordered: new Uint32Array(), column: 0, isDescending: true, active: 0, marked: -1 };
  const head = make("tr"), body = make("tbody"), table = make("table", {}, make("thead", {}, head), body);
  const scroll = make("div", { className: "rows", tabIndex: -1 }, table);
  table.setAttribute("aria-label", "Blocks");
  const empty = make("p", { className: "absent", textContent: "No block matches.", hidden: true });
  root.replaceChildren(scroll, empty);
  columns.forEach((column, index) => head.append(make("th", { scope: "col", className: `${column.kind} col-${column.key}` },
    makeButton(column.title, () => sortBy(index)))));

  function sortBy(index) {
    state.isDescending = state.column === index ? !state.isDescending : columns[index].kind === "number";
    state.column = index;
    order();
  }
  function order() {
    state.ordered = sortBlocks(state.indices, columns[state.column].field, state.isDescending, kind, numKinds);
    [...head.children].forEach((cell, index) => {
      cell.ariaSort = index !== state.column ? "none" : state.isDescending ? "descending" : "ascending";
    });
    table.setAttribute("aria-rowcount", String(state.ordered.length + 1));
    state.active = 0;
    scroll.scrollTop = 0;
    redraw();
  }

  function redraw() {
    scroll.hidden = !state.ordered.length;
    empty.hidden = !scroll.hidden;
    const { ordered } = state, visible = Math.ceil((scroll.clientHeight || 500) / ROW);
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - EXTRA), end = Math.min(ordered.length, first + visible + 2 * EXTRA);
    const hadFocus = body.contains(document.activeElement);
    const space = (rows) => {
      const row = make("tr", { className: "space" }, make("td"));
      row.ariaHidden = "true";
      row.firstChild.style.height = `${rows * ROW}px`;
      return rows > 0 ? [row] : [];
    };
    const rows = Array.from(ordered.subarray(first, end), (i, place) => makeRow(i, first + place));
    body.replaceChildren(...space(first), ...rows, ...space(ordered.length - end));
    if (!rows.some((row) => row.tabIndex === 0) && rows.length) rows[0].tabIndex = 0;
    if (hadFocus) body.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
  }

  function makeRow(i, place) {
    const row = make("tr", { tabIndex: place === state.active ? 0 : -1, className: i === state.marked ? "chosen" : "" },
      ...columns.map((column) => makeCell(i, column)));
    row.dataset.block = String(data.blocks.block[i]);
    row.dataset.place = String(place);
    row.setAttribute("aria-rowindex", String(place + 2));
    row.ariaSelected = String(i === state.marked);
    return row;
  }
  function makeCell(i, column) {
    const text = column.text(i), cell = make("td", { className: `${column.kind} col-${column.key}`, title: text });
    if (column.key === "size") {
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = act.swatch(i);
      cell.append(swatch);
    }
    cell.append(column.kind === "code" && text ? make("code", { textContent: text }) : text || "–");
    if (column.filter && text) {
      const button = make("button", { type: "button", className: "cell-filter", textContent: "+", tabIndex: -1, title: `Show only blocks with this ${column.title}` });
      button.ariaLabel = button.title;
      button.dataset.filter = column.filter;
      cell.append(button);
    }
    return cell;
  }

  function moveTo(place) {
    state.active = Math.min(Math.max(place, 0), state.ordered.length - 1);
    const top = state.active * ROW, room = scroll.clientHeight - 2 * ROW;
    if (top < scroll.scrollTop) scroll.scrollTop = top; else if (top > scroll.scrollTop + room) scroll.scrollTop = top - room;
    redraw();
    body.querySelector(`[data-place='${state.active}']`)?.focus({ preventScroll: true });
  }
  const open = (row) => { state.active = Number(row.dataset.place); act.open(state.ordered[state.active]); };
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-place]"), field = event.target.dataset.filter;
    if (!row) return;
    if (field) act.filter(field, state.ordered[Number(row.dataset.place)]); else open(row);
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-place]"), page = Math.max(1, Math.floor(scroll.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!row || event.target !== row) return;
    if (event.key === "Enter" || event.key === " ") open(row);
    else if (event.key in moves) moveTo(Number(row.dataset.place) + moves[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  scroll.addEventListener("scroll", () => requestAnimationFrame(redraw));
  return {
    show(indices) { state.indices = indices; order(); },
    mark(i) { state.marked = i; redraw(); },
    ordered: () => state.ordered,
    redraw,
  };
}
