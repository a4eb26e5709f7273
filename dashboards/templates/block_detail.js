// One block in full: sizes, category and the reason for it, allocation with source lines, accesses, free, and links to others.
const MAX_SHOWN_ACCESSES = 200;

// Fills root. `act.open(i)` shows another block, `act.filter(field, value)` filters by a value of this one, `act.close()`.
// Returns show(i), where -1 is no block.
function mountDetail(root, data, act) {
  const { blocks, kinds } = data, fields = blockFields(data);
  const textOf = (field, i) => fields[field].ofKind(blocks.kind[i]);
  const stepText = (step) => (step < 0 ? "" : `step ${step}`);
  const join = (...parts) => parts.filter(Boolean).join(", ");

  function categoryReason(i) {
    const k = blocks.kind[i], { name, meaning } = data.categories[kinds.category[k]];
    if (kinds.is_labeled[k]) return "label of the program";
    if (kinds.is_likely[k]) return "likely: memory ran out before the backward that would have read it";
    return name === "unknown" ? meaning : `inferred: ${meaning}`;
  }
  function allocationText(i) {
    if (blocks.begin_row[i] < 0) return join(`before the start of the ${data.scope}`, formatTime(blocks.begin_us[i]));
    return join(formatTime(blocks.begin_us[i]), data.eventText(blocks.begin_row[i]), stepText(blocks.step[i]), textOf("phase", i));
  }
  function freeText(i) {
    if (blocks.end_row[i] >= data.num_rows) return `not freed in the ${data.scope}`;
    const k = blocks.kind[i], module = data.modules[kinds.free_module[k]];
    return join(formatTime(blocks.end_us[i]), data.eventText(blocks.end_row[i]), stepText(blocks.free_step[i]),
      data.phase_names[kinds.free_phase[k]] ?? "", module && `in ${module}`);
  }
  function freedBy(i) {
    if (blocks.end_row[i] >= data.num_rows) return "";
    return textOf("freed", i) || (data.has_accesses ? "the program, outside of any operator" : "unknown");
  }
  function segmentText(i) {
    const { segments, addresses } = data;
    if (!segments || !addresses || addresses.offset[i] < 0) return "";
    const offset = addresses.offset[i];
    for (let s = 0; s < segments.offset.length; s++) {
      const isLive = segments.begin_row[s] <= blocks.begin_row[i] && (segments.end_row[s] < 0 || segments.end_row[s] > blocks.begin_row[i]);
      const start = segments.offset[s];
      if (isLive && start <= offset && offset < start + segments.size[s]) {
        return `${formatBytes(segments.size[s])} at 0x${(blocks.address[i] - (offset - start)).toString(16)}, ${formatBytes(offset - start)} into it`;
      }
    }
    return "";
  }

  function facts(i) { // term, text, field to filter by
    const k = blocks.kind[i], lifetime = lifetimeOf(blocks, i), allocated = kinds.allocated_size[k];
    return [
      ["Size", `${formatBytes(blocks.size[i])} (${formatCount(blocks.size[i], "byte")})`, "size"],
      ["Allocated size", allocated < 0 ? "" : `${formatBytes(allocated)}${allocated > blocks.size[i] ? `, ${formatBytes(allocated - blocks.size[i])} of rounding` : ""}`],
      ["Category", `${textOf("category", i)} (${categoryReason(i)})`, "category"],
      ["Tensor", textOf("name", i), "name"],
      ["Module", textOf("module", i), "module"],
      ["Allocated by", textOf("operator", i), "operator"],
      ["Allocated", allocationText(i), blocks.step[i] < 0 ? undefined : "step"],
      ["Freed by", freedBy(i), textOf("freed", i) ? "freed" : undefined],
      ["Freed", freeText(i)],
      ["Lifetime", formatTime(lifetime)],
      ["Address", blocks.address[i] < 0 ? "" : `0x${blocks.address[i].toString(16)}`, "address"],
      ["Segment", segmentText(i)],
      ["Stream", textOf("stream", i), "stream"],
    ].filter(([, text]) => text);
  }

  function neighbourAtAddress(i, direction) { // the block before or after this one at the same address; -1: none
    if (blocks.address[i] < 0) return -1;
    for (let other = i + direction; other >= 0 && other < blocks.size.length; other += direction) {
      if (blocks.address[other] === blocks.address[i]) return other;
    }
    return -1;
  }

  function linksOf(i) {
    const earlier = neighbourAtAddress(i, -1), later = neighbourAtAddress(i, 1), links = [];
    if (earlier >= 0) links.push(makeButton("◀ Previous at this address", () => act.open(earlier)));
    if (later >= 0) links.push(makeButton("Next at this address ▶", () => act.open(later)));
    if (textOf("site", i)) links.push(makeButton("Blocks of the same site", () => act.filter("site", i)));
    if (blocks.begin_row[i] >= 0) links.push(makeButton("Live set at its allocation", () => act.goTo(blocks.begin_row[i])));
    return links;
  }

  function excerptOf(frame) { // [number of the first line, lines, place of the line of the frame]; null: none on this page
    const { file, line, files } = data.frames, pieces = data.sources.excerpts[files[file[frame]]] ?? [];
    for (const [first, lines] of pieces) {
      const place = line[frame] - first;
      if (place >= 0 && place < lines.length) {
        const from = Math.max(0, place - 3);
        return [first + from, lines.slice(from, place + 4), place - from];
      }
    }
    return null;
  }
  function makeExcerpt(frame) {
    const excerpt = excerptOf(frame);
    if (!excerpt) return [];
    const [first, lines, chosen] = excerpt, { file, files } = data.frames;
    const code = make("pre", { className: "source" }, ...lines.map((text, place) => make("span", { className: place === chosen ? "here" : "" },
      make("i", { textContent: String(first + place).padStart(5) }), ` ${text}\n`)));
    code.tabIndex = 0;
    code.ariaLabel = `Source of ${frameText(data, frame)}`;
    const isNewer = data.sources.newer.includes(files[file[frame]]);
    return [code, ...(isNewer ? [make("p", { className: "note", textContent: "The file changed after the recording began: these lines may not be those that ran." })] : [])];
  }
  function makeStack(i) {
    const frames = framesOfStack(data, blocks.stack[i]);
    if (!frames.length) return make("p", { className: "note", textContent: `No call stack: ${data.no_stack_reasons[kinds.no_stack_reason[blocks.kind[i]]] ?? "the trace has none"}.` });
    const stack = make("ol", { className: "stack" }), hasOwn = frames.some((frame) => isOwnFrame(data, frame));
    for (let first = 0, end; first < frames.length; first = end) {
      end = first + 1;
      while (end < frames.length && !isOwnFrame(data, frames[first]) && !isOwnFrame(data, frames[end])) end++;
      const items = frames.slice(first, end).map(makeFrame);
      if (items.length < 4 || !hasOwn) stack.append(...items);
      else stack.append(make("li", {}, make("details", {}, make("summary", { textContent: `${items.length} frames of libraries` }), make("ul", {}, ...items))));
    }
    return stack;
  }
  function makeFrame(frame) {
    const isOwn = isOwnFrame(data, frame), excerpt = makeExcerpt(frame);
    const line = make("code", { textContent: shortFrameText(data, frame), title: frameText(data, frame) });
    const content = excerpt.length ? make("details", { open: isOwn }, make("summary", {}, line), ...excerpt) : line;
    return make("li", { className: isOwn ? "own" : "" }, content);
  }

  function makeAccesses(i) {
    const k = blocks.kind[i], numReads = kinds.num_reads[k], numWrites = kinds.num_writes[k];
    if (!data.has_accesses) return [make("p", { className: "note", textContent: "The trace has no accesses." })];
    const counts = `${formatCount(numReads, "read")} and ${formatCount(numWrites, "write")}`;
    const { index, row, time_us, operator, is_read } = data.accesses, first = lowerBound(index, i), end = lowerBound(index, i + 1);
    if (first === end) {
      return [make("p", { className: "note", textContent: numReads + numWrites ? `${counts}. The page lists the accesses of the largest blocks only.` : "Never read or written." })];
    }
    const rows = Array.from({ length: Math.min(end - first, MAX_SHOWN_ACCESSES) }, (_, n) => first + n).map((n) => make("tr", {},
      make("td", { className: "number", textContent: formatTime(time_us[n]) }), make("td", { textContent: is_read[n] ? "read" : "write" }),
      make("td", { className: "code" }, make("code", { textContent: data.operators[operator[n]] || "–" })),
      make("td", { className: "number", textContent: stepAt(time_us[n]) }), make("td", {}, makeButton("→", () => act.goTo(row[n]), `Show the live set at ${data.eventText(row[n])}`))));
    const head = make("tr", {}, ...["time", "access", "operator", "step", ""].map((title) => make("th", { scope: "col", textContent: title })));
    const more = end - first > rows.length ? [make("p", { className: "note", textContent: `The first ${rows.length} of ${formatCount(end - first, "access", "accesses")}.` })] : [];
    const scroll = make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
    scroll.setAttribute("role", "group");
    scroll.ariaLabel = "Accesses";
    return [make("p", { textContent: `${counts}.` }), scroll, ...more];
  }
  function stepAt(us) {
    const { start_us, end_us, index } = data.steps, place = lowerBound(start_us, us + 1) - 1;
    return place >= 0 && us <= end_us[place] ? String(index[place]) : "";
  }

  function makeFact(i, [term, text, field]) {
    const value = make("dd", { textContent: text });
    if (field) {
      const button = makeButton("+", () => act.filter(field, i), `Show only blocks with this ${fields[field].label}`);
      button.className = "cell-filter";
      button.ariaLabel = button.title;
      value.append(" ", button);
    }
    return make("div", {}, make("dt", { textContent: term }), value);
  }

  return (i) => {
    root.hidden = i < 0;
    if (i < 0) return root.replaceChildren();
    const close = makeButton("×", act.close, "Close the block");
    close.ariaLabel = close.title;
    return root.replaceChildren(make("h3", {}, `Block ${blocks.block[i].toLocaleString("en-US")}`, close),
      make("div", { className: "links" }, ...linksOf(i)), make("dl", {}, ...facts(i).map((fact) => makeFact(i, fact))),
      make("h4", { textContent: "Call stack of the allocation" }), makeStack(i), make("h4", { textContent: "Accesses" }), ...makeAccesses(i));
  };
}
