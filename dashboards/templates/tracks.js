// The tracks: views on one time axis, the range of which is `from` and `to` of the store. They are redrawn once per frame
// at most; the pointer, the chosen instant and the selection are elements above them, which move without a drawing.

// Fills root with the tracks of the data of a view. Returns a function that draws them again, for another theme.
function mountTracks(root, data, store, colors) {
  const axis = createAxis(data, store), layout = createLayout(axis);
  const blockColors = () => coloringOf(data);
  const matching = rememberLast(() => `${store.get().step} ${store.get().module}`, () => matchingBlocks(data, store.get()));
  const layers = rememberLast(() => `${chosenColoring(data)} ${store.get().step} ${store.get().module}`,
    () => curveLayers(data, chosenColoring(data), blockColors(), matching()));
  const parts = { data, store, axis, colors, layout, layers, coloring: blockColors, matching };
  const curve = createCurveTrack(parts), lanes = createLanesTrack(parts), addresses = createAddressTrack(parts);
  const tracks = [["Memory", curve], ["Steps, modules and operators", lanes], ["Blocks and segments by address", addresses]].filter(([, track]) => !track.isEmpty);
  const navigation = createNavigation(parts);
  const elements = makeElements(root, tracks, parts);
  const { area, ruler, cursor, instant, brush } = elements;
  let isRequested = false, dragged = null; // dragged: the range that is being selected

  function requestDraw() {
    if (isRequested) return;
    isRequested = true;
    requestAnimationFrame(() => { isRequested = false; draw(); });
  }
  function draw() {
    if (!area.clientWidth) return;
    const begin = performance.now();
    layout.width = area.clientWidth;
    layout.left = layout.width < 600 ? 64 : 84;
    layout.plot = layout.width - layout.left - 2;
    drawRuler(ruler, axis, layout, colors());
    for (const [, track] of tracks) track.draw();
    placeMarks();
    drawLegend(elements.legend, parts, curve);
    updateTools();
    root.dataset.drawMs = (performance.now() - begin).toFixed(1);
    root.dataset.range = store.get().from === null ? "" : `${store.get().from}..${store.get().to}`;
    root.dataset.draws = String(Number(root.dataset.draws ?? 0) + 1);
  }
  function placeMarks() {
    const { at, brush: chosen } = store.get(), range = dragged ?? (chosen && chosen.map(axis.positionOfTime));
    placeBetween(instant, layout, at === null ? null : [axis.positionOfRow(at), axis.positionOfRow(at)]);
    placeBetween(brush, layout, range);
  }
  const blockRange = () => { const i = data.blocks.block.indexOf(store.get().block ?? -1); return i < 0 || addresses.isEmpty ? null : addresses.rangeOf(i); };
  const select = () => navigation.showSelection(blockRange);
  const clear = () => store.set({ brush: null, step: null, module: null, block: null, show: null }, { push: true });

  function updateTools() {
    const { brush: chosen, step, module, axis: kind, fit } = store.get();
    elements.fit.setAttribute("aria-pressed", String(fit !== null));
    elements.pan.setAttribute("aria-pressed", String(elements.isPanning));
    elements.axisChoice.querySelector("select").value = kind ?? (data.has_times ? "time" : "event");
    elements.colorChoice.querySelector("select").value = chosenColoring(data);
    elements.selection.hidden = !chosen && step === null && !module;
    elements.selectionText.textContent = [chosen && describeRange(data, chosen), step !== null && `Step ${step}.`, module && `Module ${module}.`].filter(Boolean).join(" ");
  }

  // Pointers.
  const positionAt = (x) => layout.positionOf(x);
  function trackAt(event) {
    const found = tracks.find(([, track]) => track.canvas === event.target);
    return found ? { track: found[1], x: event.clientX - area.getBoundingClientRect().left, y: event.clientY - found[1].canvas.getBoundingClientRect().top } : null;
  }
  function hover(event) {
    const place = event && trackAt(event);
    const x = event ? event.clientX - area.getBoundingClientRect().left : -1;
    const isInside = event && x >= layout.left && x <= layout.width;
    cursor.hidden = !isInside;
    elements.tip.hidden = !isInside || !place;
    if (!isInside) return;
    cursor.style.transform = `translateX(${x}px)`;
    if (place) showTip(elements.tip, area, event, [[axis.isByEvent() ? data.eventText(Math.round(positionAt(x))) : preciseTime(axis, layout, positionAt(x)), "", null],
      ...place.track.describe(positionAt(x), place.y)]);
  }
  listenToPointers(area, {
    hover,
    wheel(x, event) {
      const place = trackAt(event);
      if (event.ctrlKey && place?.track.zoomAddresses) { place.track.zoomAddresses(place.y, event.deltaY > 0 ? 1.25 : 0.8); requestDraw(); return true; }
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        navigation.pan((Math.sign(event.deltaX || event.deltaY) * Math.min(Math.abs(event.deltaX || event.deltaY), 120)) / 800);
        return true;
      }
      if (event.deltaY > 0 && store.get().from === null) return false; // nothing to zoom out of: the page scrolls
      navigation.zoom(1.002 ** Math.min(Math.max(event.deltaY * (event.deltaMode === 1 ? 30 : 1), -150), 150), positionAt(Math.max(x, layout.left)));
      return true;
    },
    kindOfDrag: (event) => (event.shiftKey || elements.isPanning || event.pointerType === "touch" ? "pan" : "brush"),
    drag(kind, x0, x1, isDone) {
      if (kind === "pan") { navigation.pan((x0 - x1) / layout.plot); return; }
      dragged = [x0, x1].map((x) => positionAt(Math.min(Math.max(x, layout.left), layout.width))).sort((a, b) => a - b);
      if (isDone) {
        const range = dragged.map((position) => Math.round(axis.timeOfPosition(position) * 1000) / 1000);
        dragged = null;
        if (range[1] > range[0]) store.set({ brush: range, show: "range" }, { push: true });
      }
      placeMarks();
    },
    pinch(before, now, factor) { navigation.zoom(factor, positionAt(before)); navigation.pan((before - now) / layout.plot); },
    click(event) {
      const place = trackAt(event);
      if (place && place.x >= layout.left) place.track.click(positionAt(place.x), place.y);
      if (event.pointerType !== "touch") area.focus({ preventScroll: true }); // for keys
    },
    doubleClick() { addresses.showAll?.(); navigation.showAll(); requestDraw(); },
  });
  const act = keyActions(navigation, { select, clear });
  listenWhileConnected(area)("keydown", (event) => {
    if (root.closest("[hidden]") || event.target.closest?.("input, select, textarea, [contenteditable]")) return;
    if ((area.matches(":hover") || area.contains(document.activeElement)) && act(event)) event.preventDefault();
  });
  elements.addTools({ navigation, select, clear, store, requestDraw });
  new ResizeObserver(requestDraw).observe(area);
  store.subscribe((state, changed) => { if (changed.some((key) => !["view", "section", "group", "search", "show"].includes(key))) requestDraw(); });
  draw();
  return draw;
}

// Where positions lie in the tracks, in CSS pixels.
function createLayout(axis) {
  const layout = { width: 0, left: 0, plot: 1 };
  layout.xOf = (position) => { const [a, b] = axis.visible(); return layout.left + ((position - a) / (b - a)) * layout.plot; };
  layout.positionOf = (x) => { const [a, b] = axis.visible(); return a + ((x - layout.left) / layout.plot) * (b - a); };
  return layout;
}

// A function that computes again only when its key changes.
function rememberLast(keyOf, compute) {
  let key = null, value = null;
  return () => {
    const now = String(keyOf());
    if (key !== now) { value = compute(keyOf()); key = now; }
    return value;
  };
}

function placeBetween(element, layout, range) {
  const [left, right] = range ? range.map((position) => Math.min(Math.max(layout.xOf(position), layout.left - 1), layout.width + 1)) : [0, 0];
  element.hidden = !range || right < layout.left || left > layout.width;
  element.style.left = `${left}px`;
  element.style.width = `${Math.max(right - left, 0)}px`;
}

function describeRange(data, [from, to]) {
  const first = data.placeAt(from), last = data.placeAt(to), change = data.total[last] - data.total[first];
  let peak = data.total[first];
  for (let i = first + 1; i <= last; i++) peak = Math.max(peak, data.total[i]);
  const length = data.has_times ? formatTime(to - from) : formatCount(data.curve.event[last] - data.curve.event[first], "event");
  return `Selected ${length}: peak ${formatBytes(peak)}, live bytes ${change >= 0 ? "+" : "−"}${formatBytes(Math.abs(change))}.`;
}
