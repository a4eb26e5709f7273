// Moving along the axis of the tracks: wheel, drag, touch and keys.

const GESTURE_PAUSE_MS = 800; // a change after a longer pause is a step of its own for the back button
const SCROLL_PAUSE_MS = 250; // a scroll of the page goes on over the tracks unless it pauses

function createNavigation({ data, store, axis, layout }) {
  let lastChange = -Infinity;
  const span = () => { const [a, b] = axis.visible(); return b - a; };

  // Shows a range; the first change after a pause can be undone with the back button.
  function show(range) {
    const now = performance.now();
    axis.show(range, { push: now - lastChange > GESTURE_PAUSE_MS });
    lastChange = now;
  }
  function zoom(factor, center = (axis.visible()[0] + axis.visible()[1]) / 2) {
    const [a, b] = axis.visible();
    show([center - (center - a) * factor, center + (b - center) * factor]);
  }
  function pan(share) {
    const [a, b] = axis.visible(), [first, last] = axis.full();
    const by = Math.min(Math.max(share * (b - a), first - a), last - b);
    if (by) show([a + by, b + by]);
  }
  const showSpan = (start, end, margin = 0) => axis.show([start - (end - start) * margin, end + (end - start) * margin], { push: true });

  function showStep(direction) { // the next or previous step; from the whole recording the first one
    const { start_us, end_us } = data.steps;
    if (!start_us.length) return;
    const [a, b] = axis.visible(), middle = (a + b) / 2, { from } = store.get();
    let place = -1;
    for (let i = 0; i < start_us.length; i++) if (axis.positionOfTime(start_us[i]) <= middle) place = i;
    const next = from === null ? (direction > 0 ? 0 : start_us.length - 1) : Math.min(Math.max(place + direction, 0), start_us.length - 1);
    showSpan(axis.positionOfTime(start_us[next]), axis.positionOfTime(end_us[next]));
  }
  function showPeak() { // the step of the peak, or a twentieth of the recording around it
    const position = axis.positionOfRow(data.peak.row), us = data.timeOfRow(data.peak.row), { start_us, end_us } = data.steps;
    const step = start_us.findIndex((start, i) => start <= us && us < end_us[i]), [first, last] = axis.full();
    store.set({ show: null, at: data.peak.row });
    if (step >= 0) showSpan(axis.positionOfTime(start_us[step]), axis.positionOfTime(end_us[step]), 0.02);
    else showSpan(position - (last - first) / 40, position + (last - first) / 40);
  }
  function showSelection(rangeOfBlock) { // the brushed range, the chosen block or step
    const { brush, step } = store.get(), range = rangeOfBlock();
    if (brush) return showSpan(axis.positionOfTime(brush[0]), axis.positionOfTime(brush[1]));
    if (range) return showSpan(range[0], range[1], 0.1);
    const place = step === null ? -1 : data.steps.index.indexOf(step);
    return place < 0 ? undefined : showSpan(axis.positionOfTime(data.steps.start_us[place]), axis.positionOfTime(data.steps.end_us[place]));
  }
  return { show, zoom, pan, span, showStep, showPeak, showSelection, showAll: () => axis.show(null, { push: true }), layout };
}

// Keys while the pointer is over the tracks or they have the focus. Returns whether a key means something.
function keyActions(navigation, { select, clear }) {
  const actions = {
    w: () => navigation.zoom(0.6), s: () => navigation.zoom(1 / 0.6), a: () => navigation.pan(-0.25), d: () => navigation.pan(0.25),
    arrowleft: () => navigation.pan(-0.1), arrowright: () => navigation.pan(0.1), "+": () => navigation.zoom(0.6), "=": () => navigation.zoom(0.6),
    "-": () => navigation.zoom(1 / 0.6), "[": () => navigation.showStep(-1), "]": () => navigation.showStep(1), p: navigation.showPeak,
    f: select, 0: navigation.showAll, escape: clear,
  };
  return (event) => {
    const action = actions[event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return false;
    action();
    return true;
  };
}

// A function that adds listeners to the window, which end when the element is no longer in the document: a page that
// gets new data makes new elements, and the old data must not stay in memory.
function listenWhileConnected(element) {
  const life = new AbortController();
  return (type, listener, options = {}) => addEventListener(type, (event) => {
    if (element.isConnected) listener(event); else life.abort();
  }, { ...options, signal: life.signal });
}

// Calls the handlers for what happens on an element: handlers.wheel(x, y, event) returns whether it is handled;
// drag(kind, x0, x1, isDone) with kind "brush" or "pan"; click(x, y); hover(x, y) with null when the pointer leaves.
function listenToPointers(element, handlers) {
  const touches = new Map(), listen = listenWhileConnected(element); // touches: pointer -> x
  let start = null, kind = null, pinch = null, lastPageScroll = -Infinity;

  listen("wheel", (event) => {
    if (!event.defaultPrevented && !element.contains(event.target)) lastPageScroll = performance.now();
  }, { passive: true });
  element.addEventListener("wheel", (event) => {
    const isPageScroll = performance.now() - lastPageScroll < SCROLL_PAUSE_MS && !event.ctrlKey;
    const box = element.getBoundingClientRect();
    if (!isPageScroll && handlers.wheel(event.clientX - box.left, event)) event.preventDefault();
    else lastPageScroll = performance.now();
  }, { passive: false });

  const xOf = (event) => event.clientX - element.getBoundingClientRect().left;
  const spread = () => { const [first, second] = touches.values(); return [(first + second) / 2, Math.max(20, Math.abs(first - second))]; };
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    touches.set(event.pointerId, xOf(event));
    if (touches.size === 2) { pinch = spread(); kind = null; start = null; return; }
    start = { x: xOf(event), event };
  });
  listen("pointermove", (event) => {
    if (!touches.has(event.pointerId)) return;
    const x = xOf(event);
    touches.set(event.pointerId, x);
    if (pinch && touches.size === 2) {
      const now = spread();
      handlers.pinch(pinch[0], now[0], pinch[1] / now[1]);
      pinch = now;
      return;
    }
    if (!start || (!kind && Math.abs(x - start.x) < 4)) return;
    if (!kind) { element.setPointerCapture(event.pointerId); kind = handlers.kindOfDrag(start.event); }
    handlers.drag(kind, start.x, x, false);
    if (kind === "pan") start = { ...start, x };
  });
  const finish = (event) => {
    if (!touches.delete(event.pointerId)) return;
    if (kind && start) handlers.drag(kind, start.x, xOf(event), true);
    else if (start && event.type === "pointerup") handlers.click(start.event);
    if (!touches.size) { start = null; kind = null; pinch = null; }
  };
  listen("pointerup", finish);
  listen("pointercancel", finish);
  element.addEventListener("pointermove", (event) => { if (!touches.size) handlers.hover(event); });
  element.addEventListener("pointerleave", () => handlers.hover(null));
  element.addEventListener("dblclick", () => handlers.doubleClick());
}
