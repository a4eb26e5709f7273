// The controls that choose which blocks the explorer lists: what to show, the instant, the search, filters to add, and chips of
// the filters that apply.
const FILTER_FIELDS = ["category", "phase", "stream", "operator", "site", "module"];
const MAX_FILTER_VALUES = 12;
const QUERY_HELP = [
  ["relu attn", "blocks whose name, module, operator, allocation site or category contains both words"],
  ["module:layers.3", "the module contains “layers.3” (but not “layers.30”)"],
  ["category:activations,gradients", "one of several values"],
  ["size:>1MiB  lifetime:<2ms  step:2..5", "numbers with >, >=, <, <= or a range"],
  ["-operator:aten::add", "everything else"],
  ["site:=\"train.py:12 main\"", "exactly this text"],
];

// Returns { element, chips, update(selection, sums, indices) }; `goTo(row)` shows the live set after a row.
function mountFilters(data, store, goTo) {
  const fields = blockFields(data);
  const showButtons = SHOWN.map(([name, label, title]) => {
    const button = makeButton(label, () => store.set({ show: name === "instant" ? null : name, zoom: null }, { push: true }), title);
    button.dataset.show = name;
    return button;
  });
  const instant = make("span", { className: "tools" }, makeButton("Peak", () => goTo(null), "Live set at the peak"),
    makeButton("◀", () => goTo(neighbourRow(-1)), "Live set before the last change"), makeButton("▶", () => goTo(neighbourRow(1)), "Live set after the next change"));
  for (const button of instant.children) if (button.title) button.ariaLabel = button.title;
  const search = make("input", { type: "search", placeholder: "Search: words, or field:value", size: 34 });
  search.setAttribute("aria-label", "Search blocks");
  const add = make("select", { title: "Filter by a value of the listed blocks" });
  add.setAttribute("aria-label", "Add a filter");
  const help = make("details", { className: "help" }, make("summary", { textContent: "Search syntax" }), make("dl", {}, ...QUERY_HELP.map(([query, meaning]) =>
    make("div", {}, make("dt", {}, make("code", { textContent: query })), make("dd", { textContent: meaning })))),
  make("p", { className: "note", textContent: `Fields: ${QUERY_FIELDS.join(", ")}.` }));
  const problems = make("p", { className: "warning", hidden: true }), chips = make("div", { className: "chips" });
  problems.setAttribute("role", "status");
  const show = make("div", { className: "tools", role: "group", ariaLabel: "Which blocks" }, ...showButtons, instant);

  let current = null;
  function neighbourRow(direction) { // the next row at which a block of the page is allocated or freed
    let best = direction > 0 ? data.num_rows - 1 : -1;
    for (const column of [data.blocks.begin_row, data.blocks.end_row]) {
      for (const row of column) if (direction > 0 ? row > current.row && row < best : row < current.row && row > best) best = row;
    }
    return best;
  }
  const addTerm = (field, value) => store.set({ search: toggleTerm(store.get().search ?? "", field, value) || null }, { push: true });

  function chip(text, title, remove) {
    const button = makeButton("×", remove, `Remove the filter ${title}`);
    button.ariaLabel = button.title;
    return make("span", { className: "chip" }, make("span", { textContent: text, title }), button);
  }
  function chipsOf({ step, module, terms, range, show: shown }) {
    const made = [];
    if (step !== null) made.push(chip(`allocated in step ${step}`, `step ${step}`, () => store.set({ step: null }, { push: true })));
    if (module !== null) made.push(chip(`in module ${module}`, module, () => store.set({ module: null }, { push: true })));
    if (shown !== "instant" && range[0] !== -Infinity) made.push(make("span", { className: "chip" }, `${formatTime(range[0])} to ${formatTime(range[1])}`));
    for (const { source } of terms) {
      const rest = terms.filter((term) => term.source !== source).map((term) => term.source).join(" ");
      made.push(chip(source.replace(/^(-?)site:=/, "$1site:").replace(/^(-?\w+):=/, "$1:"), source, () => store.set({ search: rest || null }, { push: true })));
    }
    if (made.length > 1) made.push(makeButton("Clear all", () => store.set({ step: null, module: null, search: null }, { push: true })));
    return made;
  }

  // Values that the listed blocks have, with the number of blocks: most blocks first.
  function offerValues(kindCounts) {
    const option = (text, value) => make("option", { textContent: text, value });
    const groups = FILTER_FIELDS.map((name) => {
      const counts = new Map();
      kindCounts.forEach((count, k) => {
        const value = fields[name].ofKind(k);
        if (count && value) counts.set(value, (counts.get(value) ?? 0) + count);
      });
      const ordered = [...counts].sort((a, b) => b[1] - a[1]).slice(0, MAX_FILTER_VALUES);
      const group = make("optgroup", { label: fields[name].label });
      group.append(...ordered.map(([value, count]) => option(`${value} (${count.toLocaleString("en-US")})`, JSON.stringify([name, value]))));
      return ordered.length > 1 ? [group] : [];
    }).flat();
    add.replaceChildren(option("Add a filter…", ""), ...groups);
  }

  search.addEventListener("input", () => store.set({ search: search.value.trim() || null }));
  add.addEventListener("change", () => { if (add.value) addTerm(...JSON.parse(add.value)); });
  return {
    element: make("div", {}, show, make("div", { className: "tools" }, search, add), help, problems, chips),
    addTerm,
    update(selection, kindCounts) {
      current = selection;
      for (const button of showButtons) button.ariaPressed = String(button.dataset.show === selection.show);
      instant.hidden = selection.show !== "instant";
      if (search !== document.activeElement) search.value = store.get().search ?? "";
      problems.hidden = !selection.problems.length;
      problems.textContent = selection.problems.join(" ");
      chips.replaceChildren(...chipsOf(selection));
      offerValues(kindCounts);
    },
  };
}
