// Which blocks the explorer lists: those of an instant or of a range of time, filtered. Results are indices of blocks in the
// order of their allocation.

const SHOWN = [ // value of `show` in the store, button, title
  ["instant", "Live at an instant", "Blocks that are live after one event"],
  ["range", "Allocated in a range", "Blocks that are allocated in the range"],
  ["churn", "Short-lived", "Blocks that are allocated and freed within the range"],
  ["kept", "Not freed", "Blocks that are allocated in the range and live at its end: what leaks out of it"],
];

function liveAt(blocks, row) { // live after a row of events
  const live = [], { begin_row, end_row } = blocks;
  for (let i = 0; i < begin_row.length && begin_row[i] <= row; i++) if (end_row[i] > row) live.push(i);
  return live;
}

// Blocks allocated from the time `from` to the time `to` (µs, both included): all, or those freed ("churn") or not freed
// ("kept") within it. `numRows` is the number of events; blocks with that end are live at the end of the recording.
function allocatedIn(blocks, [from, to], show, numRows) {
  const found = [], { begin_row, begin_us, end_row, end_us } = blocks;
  for (let i = 0; i < begin_row.length; i++) {
    if (begin_row[i] < 0 || begin_us[i] < from || begin_us[i] > to) continue;
    const isFreed = end_row[i] < numRows && end_us[i] <= to;
    if (show === "range" || (show === "churn") === isFreed) found.push(i);
  }
  return found;
}

const isInModule = (name, module) => name === module || name.startsWith(`${module}.`);

// What the state of the page means for the blocks of a view.
function describeSelection(data, state) {
  const { at, step, module, show, search, from, to } = state;
  const range = state.brush ?? stepRange(data, step) ?? (from === null ? [-Infinity, Infinity] : [from, to]);
  return {
    show: SHOWN.some(([name]) => name === show) ? show : "instant",
    row: Math.min(Math.max(Math.round(at ?? peakRow(data, stepRange(data, step))), -1), data.num_rows - 1),
    range, step, module, ...parseQuery(search ?? ""),
  };
}

function stepRange(data, step) {
  const place = step === null ? -1 : data.steps.index.indexOf(step);
  return place < 0 ? null : [data.steps.start_us[place], data.steps.end_us[place]];
}

// Row of the peak of the recording, or of the highest instant of a range.
function peakRow(data, range) {
  if (!range) return data.peak.row;
  const { curve, total } = data, last = Math.max(data.placeAt(range[0]), data.placeAt(range[1]));
  let best = data.placeAt(range[0]);
  for (let place = best; place <= last; place++) if (total[place] > total[best]) best = place;
  return curve.event[best];
}

// Returns select(selection) -> indices; the filter is kept while the terms stay the same.
function createSelector(data) {
  const fields = blockFields(data), { blocks, kinds } = data, numKinds = kinds.size.length;
  let compiled = { key: null, matches: null };
  function filter({ terms, step, module }) {
    const key = JSON.stringify([terms.map((term) => term.source), step, module]);
    if (key !== compiled.key) {
      const matchesQuery = compileQuery(terms, fields, blocks.kind, numKinds);
      const inModule = Uint8Array.from({ length: numKinds }, (_, k) => Number(module === null || isInModule(fields.module.ofKind(k), module)));
      const matches = (i) => (step === null || blocks.step[i] === step) && inModule[blocks.kind[i]] === 1 && matchesQuery(i);
      compiled = { key, matches: terms.length || step !== null || module !== null ? matches : null };
    }
    return compiled.matches;
  }
  return (selection) => {
    const { show, row, range } = selection, matches = filter(selection);
    const indices = show === "instant" ? liveAt(blocks, row) : allocatedIn(blocks, range, show, data.num_rows);
    return matches ? indices.filter(matches) : indices;
  };
}

// Bytes and number of the blocks that the page leaves out, as far as its sums know: { bytes, count, isExact }; null: none
// are left out, or unknown.
function leftOutOf(data, { show, row, range, step, module, terms }) {
  const { row: rows, live_bytes, num_live, allocated_bytes, num_allocated } = data.left_out;
  if (!rows.length || step !== null || module !== null || terms.length) return null;
  const placeOf = (at) => Math.max(0, lowerBound(rows, at + 1) - 1);
  if (show === "instant") {
    const place = placeOf(row);
    return { bytes: live_bytes[place], count: num_live[place], isExact: rows[place] === row };
  }
  if (show !== "range") return null;
  const [from, to] = range, isWhole = from === -Infinity;
  const first = isWhole ? 0 : placeOf(data.rowAt(from)), last = isWhole ? rows.length - 1 : placeOf(data.rowAt(to));
  return { bytes: allocated_bytes[last] - allocated_bytes[first], count: num_allocated[last] - num_allocated[first], isExact: isWhole };
}
