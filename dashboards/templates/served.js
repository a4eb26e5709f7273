// A page that gets its data from memtrace serve: payloads of the visible window, and the status of running recordings.
//
// A payload has rows of its own: those of a window, or the instants of an overview. The state of the page has the rows of
// the whole trace; each widget gets a store that translates between the two.
const POLL_MS = 1000, REQUEST_DELAY_MS = 200, MIN_RELOAD_MS = 1500;
const MAX_COARSENESS = 4; // a detail stays until the visible range is that much narrower than the window of the detail

function createServed(source, store) {
  const views = new Map(); // view -> {overview, detail, shown, mounts, version, wanted, timer, loadedAt}
  const viewOf = (view) => {
    if (!views.has(view)) views.set(view, { overview: null, detail: null, shown: null, mounts: new Set(), version: -1, wanted: "", missing: "", timer: 0, loadedAt: 0 });
    return views.get(view);
  };
  let isPressed = false; // a payload never replaces what is being dragged
  addEventListener("pointerdown", () => { isPressed = true; }, true);
  for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => { isPressed = false; }, true);

  async function get(path, parameters = {}) {
    const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { cache: "no-store" });
    if (!response.ok) throw new Error((await response.text()).trim());
    return response.json();
  }
  async function fetchData(view, range) { // range in µs; null: everything
    const parameters = range === null ? {} : { from_ns: Math.floor(range[0]) * 1000, to_ns: Math.ceil(range[1]) * 1000 };
    const { version, payload } = await get("/api/payload", { view, ...parameters });
    if (!payload) return { version, data: null };
    const data = await source.unpack(payload), { served } = data;
    const rows = createRows(data), isWhole = served.window_us[0] <= served.range_us[0] && served.window_us[1] >= served.range_us[1];
    return { version, data: { ...data, rows, range: served.range_us, scope: isWhole ? "trace" : "loaded window", note: payload.note,
      eventText: (row) => `event ${rows.toWhole(row).toLocaleString("en-US")}` } };
  }

  // Which data the visible range needs. Shows what there is at once, and asks for what is missing.
  function update(view) {
    const entry = viewOf(view), { from, to } = store.get();
    if (!entry.overview) return;
    const { detail } = entry, isWhole = from === null || entry.overview.served.is_exact;
    const fits = detail && from !== null && detail.served.window_us[0] <= from && to <= detail.served.window_us[1];
    show(view, !isWhole && fits ? detail : entry.overview);
    const span = to - from, isFine = fits && (detail.served.is_exact ||
      detail.served.window_us[1] - detail.served.window_us[0] <= MAX_COARSENESS * span);
    clearTimeout(entry.timer);
    if (!isWhole && !isFine) entry.timer = setTimeout(() => loadDetail(view), REQUEST_DELAY_MS);
  }
  async function loadDetail(view) {
    const entry = viewOf(view), { from, to } = store.get();
    if (from === null) return;
    const [first, last] = entry.overview.range, margin = (to - from) / 2;
    const range = [Math.max(first, from - margin), Math.min(last + 1, to + margin)], wanted = range.join();
    if (entry.wanted === wanted || entry.missing === wanted) return;
    entry.wanted = wanted;
    document.body.dataset.loading = "true";
    try {
      const { data } = await fetchData(view, range);
      if (entry.wanted === wanted && data) entry.detail = data;
      if (!data) entry.missing = wanted; // the device has no blocks there
    } catch (error) {
      report(error);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS)); // before the next attempt
    }
    if (entry.wanted !== wanted) return;
    entry.wanted = "";
    delete document.body.dataset.loading;
    update(view);
  }
  async function loadOverview(view) {
    const entry = viewOf(view);
    entry.loadedAt = performance.now();
    const { version, data } = await fetchData(view, null);
    entry.version = version;
    if (!data) return;
    entry.overview = data;
    if (entry.detail && entry.detail.served.window_us[1] >= data.range[1]) entry.detail = null;
    update(view);
  }
  function show(view, data) {
    const entry = viewOf(view);
    if (entry.shown === data) return;
    if (isPressed) { setTimeout(() => update(view), REQUEST_DELAY_MS); return; }
    entry.shown = data;
    for (const mount of entry.mounts) mount(data);
  }

  const status = createStatus(get, (state) => {
    for (const rank of state.ranks) for (const view of Object.keys(rank.views)) {
      const entry = viewOf(view), isOld = entry.version >= 0 && entry.version !== rank.version;
      if (isOld && entry.mounts.size && performance.now() - entry.loadedAt > MIN_RELOAD_MS) loadOverview(view).catch(report);
    }
  });
  const report = (error) => status.report(String(error.message ?? error));
  store.subscribe((state, changed) => {
    if (changed.includes("from") || changed.includes("to")) for (const [view, { mounts }] of views) if (mounts.size) update(view);
  });

  return {
    // Mounts a widget in root, again for each payload. Returns a function that draws it again, for another theme.
    async mount(root, view, mountWidget, colors) {
      const entry = viewOf(view);
      let redraw = () => {}, life = { isOver: false };
      const mount = (data) => {
        const focus = pathOfFocus(root), host = make("div", { className: root.className.replace("widget ", "") });
        life.isOver = true;
        life = { isOver: false };
        root.replaceChildren(host, make("p", { className: "note", textContent: data.note }));
        redraw = mountWidget(host, data, scopeStore(store, data, life), colors);
        root.dataset.exact = String(data.served.is_exact);
        root.dataset.window = data.served.window_us.join();
        focusPath(root, focus);
      };
      entry.mounts.add(mount);
      linkRange(root.closest(".view"), view, store);
      if (!entry.overview) await (entry.opening ??= loadOverview(view)).catch(report);
      if (!root.firstChild && entry.shown) mount(entry.shown);
      return () => redraw();
    },
  };
}

// The link to the page of all results of the visible range.
function linkRange(root, view, store) {
  const link = root.querySelector("a.range-results");
  if (!link || link.dataset.isLinked) return;
  link.dataset.isLinked = "true";
  const update = () => {
    const { from, to } = store.get();
    const range = from === null ? {} : { from_ns: Math.floor(from) * 1000, to_ns: Math.ceil(to) * 1000 };
    link.href = `/range?${new URLSearchParams({ view, ...range })}`;
  };
  store.subscribe(update);
  update();
}

// Rows of a payload and rows of the whole trace.
function createRows({ served, served_rows: map, num_rows: length }) {
  if (!map) {
    return {
      toWhole: (row) => Math.max(row, served.first_row - 1) + served.row_offset, // older blocks: the row before the window
      toOwn: (row) => (row - served.row_offset < served.first_row ? -1 : Math.min(row - served.row_offset, length - 1)),
    };
  }
  return {
    toWhole: (row) => (row < 0 ? map.row[0] - 1 : map.row[Math.min(row, map.row.length - 1)]),
    toOwn: (row) => lowerBound(map.row, row + 1) - 1,
  };
}

// The store for a widget that shows one payload, until another takes its place.
function scopeStore(store, { rows }, life) {
  const translate = (state) => (state.at === null ? state : { ...state, at: rows.toOwn(state.at) });
  return {
    ...store,
    get: () => translate(store.get()),
    set(patch, options) {
      if (life.isOver) return;
      store.set(patch.at === undefined || patch.at === null ? patch : { ...patch, at: rows.toWhole(patch.at) }, options);
    },
    subscribe(listener) {
      const stop = store.subscribe((state, changed) => { if (life.isOver) stop(); else listener(translate(state), changed); });
    },
  };
}

// Where the focus is in an element, and the same place in its new content: keys work on, and words can be typed.
function pathOfFocus(root) {
  const path = [];
  for (let element = document.activeElement; element && root.contains(element) && element !== root; element = element.parentElement) {
    path.unshift([...element.parentElement.children].indexOf(element));
  }
  const { value, selectionStart } = document.activeElement ?? {};
  return { path, value, selectionStart };
}
function focusPath(root, { path, value, selectionStart }) {
  const element = path.length ? path.reduce((parent, place) => parent?.children[place], root) : null;
  if (!element) return;
  element.focus({ preventScroll: true });
  if (element instanceof HTMLInputElement && element.type === "search") {
    element.value = value;
    element.setSelectionRange(selectionStart, selectionStart);
  }
}

// The status of the server, asked for every second: progress of the index, and running recordings.
function createStatus(get, onStatus) {
  const panel = document.getElementById("served-status"), lines = document.getElementById("served-lines");
  const known = new Set([...document.querySelectorAll(".view")].map((view) => view.dataset.view));
  let failure = "";
  const draw = (state) => {
    const indexing = state.ranks.filter((rank) => rank.num_indexed < rank.num_parts);
    const recordings = state.ranks.filter((rank) => rank.live);
    lines.replaceChildren(
      ...indexing.map((rank) => make("p", {}, `Rank ${rank.rank}: ${rank.num_indexed.toLocaleString("en-US")} of `
        + `${formatCount(rank.num_parts, "part")} indexed. `,
        Object.assign(make("progress"), { max: rank.num_parts, value: rank.num_indexed }))),
      ...state.ranks.filter((rank) => rank.error).map((rank) => make("p", { className: "warning", textContent: `Rank ${rank.rank}: ${rank.error}` })),
      ...recordings.map((rank) => describeRecording(rank, recordings.length > 1)),
    );
    panel.hidden = !lines.childElementCount && !failure;
    panel.dataset.state = recordings.map((rank) => rank.live.state).join(" ");
  };
  async function poll() {
    let isOver = false;
    try {
      const state = await get("/api/status");
      failure = "";
      draw(state);
      const now = state.ranks.flatMap((rank) => Object.keys(rank.views));
      if (now.some((view) => !known.has(view))) { location.reload(); return; }
      onStatus(state);
      const isIndexed = state.ranks.every((rank) => rank.num_indexed >= rank.num_parts);
      isOver = isIndexed && !state.ranks.some((rank) => ["running", "unknown"].includes(rank.live?.state));
    } catch (error) { report(`The server does not answer: ${error.message}`); }
    setTimeout(poll, isOver ? 5 * POLL_MS : POLL_MS);
  }
  function report(text) {
    failure = text;
    panel.hidden = false;
    lines.replaceChildren(make("p", { className: "warning", textContent: text }));
  }
  poll();
  return { report };
}

function describeRecording(rank, withRank) {
  const { live } = rank, states = { running: "is running", finished: "has ended; the trace is complete",
    stopped: "ended before it completed the trace", unknown: "has recorded nothing for some seconds" };
  const name = withRank ? `Rank ${rank.rank}: the recording` : "The recording";
  const head = make("p", { className: "state", textContent: `${name} ${states[live.state]}`
    + `${live.num_events === undefined ? "" : `: ${live.num_events.toLocaleString("en-US")} events, ${formatTime(live.time_ns / 1000)}`}.` });
  return make("div", { className: "recording" }, head, ...live.devices.map(describeDevice));
}

function describeDevice(device) {
  const orUnknown = (value, format) => (value === null ? "unknown" : format(value));
  const { step } = device, duration = (ns) => formatTime(ns / 1000);
  const facts = [
    ["Memory now", formatBytes(device.live_bytes) + (device.capacity_bytes ? ` of ${formatBytes(device.capacity_bytes)}` : "")],
    ["Peak so far", formatBytes(device.peak_bytes)],
    ["Reserved", device.reserved_bytes === null ? "" : formatBytes(device.reserved_bytes)],
    ["This step", step === null ? "unknown: no step has ended" : `step ${step.number}: ${formatBytes(step.peak_bytes)} after `
      + `${duration(step.duration_ns)}; usually ${formatBytes(step.usual_peak_bytes)} in ${duration(step.usual_duration_ns)}`],
    ["Growth", orUnknown(device.growth_bytes_per_step, (bytes) => (bytes > 0 ? `${formatBytes(bytes)} per step` : "none"))],
    ["Out of memory", device.growth_bytes_per_step !== null && device.growth_bytes_per_step <= 0 ? "not at this growth"
      : orUnknown(device.steps_to_capacity, (steps) => `in ${formatCount(steps, "step")}, ${duration(device.ns_to_capacity)}`)],
  ].filter(([, value]) => value);
  const canvas = make("canvas", { className: "spark" });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Memory of ${device.device} in the last minutes`);
  requestAnimationFrame(() => drawSamples(canvas, device.samples));
  const sites = device.sites.map((site) => make("li", {}, make("code", { textContent: site.site ?? "(no call stack)" }),
    ` ${formatBytes(site.bytes_per_step)} per step (${site.category})`));
  return make("div", { className: "device" }, make("h3", { textContent: device.device }),
    make("dl", {}, ...facts.map(([term, value]) => make("div", {}, make("dt", { textContent: term }), make("dd", { textContent: value })))),
    canvas, ...(sites.length ? [make("p", { textContent: "Allocation sites that grow:" }), make("ul", {}, ...sites)] : []));
}

function drawSamples(canvas, samples) { // pairs of time and bytes
  if (samples.length < 2 || !canvas.isConnected) return;
  const height = 48, pen = preparePen(canvas, height), width = canvas.clientWidth;
  const [first, last] = [samples[0][0], samples[samples.length - 1][0]], most = Math.max(1, ...samples.map(([, bytes]) => bytes));
  pen.strokeStyle = getComputedStyle(canvas).color;
  pen.beginPath();
  for (const [time, bytes] of samples) {
    pen.lineTo(((time - first) / (last - first || 1)) * width, height - 2 - (bytes / most) * (height - 4));
  }
  pen.stroke();
}
