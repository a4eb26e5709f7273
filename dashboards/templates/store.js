// The state of the page: what is visible and what is chosen. It is in the fragment of the address (#at=42&color=site), so
// that a link opens the same picture and the back button undoes a choice.
//
//   view    the visible view (rank and device)          from, to  the visible time range in µs; null: all
//   at      event row of the chosen instant; null: none  block     id of the chosen block; null: none
//   show    blocks to list: instant, range, churn, kept  group     module, site, stack, category, operator
//   search  words that blocks must contain               step, module  blocks must belong to them; null: any
//   color   what the colors mean                         section   section to scroll to
//   zoom    chosen box of the icicle; null: all          frames    of call stacks: own, all
//   measure width of its boxes: bytes, count             graph     icicle, flame
//   highlight  text that boxes contain                   brush     selected time range in µs; null: none
//   axis    time or event; null: as the data suggest     fit       whether the height fits the visible range
//   hide    numbers of the areas of the curve that are hidden, with commas
const NUMBERS = ["from", "to", "at", "block", "step", "zoom"];
const TEXTS = ["view", "show", "group", "search", "module", "color", "section", "frames", "measure", "graph", "highlight", "axis",
  "hide", "fit"];
const RANGES = ["brush"]; // written as start..end
const WRITE_DELAY_MS = 250; // browsers refuse many changes of the address in a short time

function createStore() {
  const listeners = new Set();
  let state = read(), timer = null;

  function read() {
    const fields = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    const number = (key) => (fields.get(key) && Number.isFinite(Number(fields.get(key))) ? Number(fields.get(key)) : null);
    const range = (key) => {
      const ends = (fields.get(key) ?? "").split("..").map(Number);
      return fields.has(key) && ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
    };
    return Object.fromEntries([...NUMBERS.map((key) => [key, number(key)]), ...TEXTS.map((key) => [key, fields.get(key)]),
      ...RANGES.map((key) => [key, range(key)])]);
  }

  function fragment() {
    const text = ([key, value]) => [key, Array.isArray(value) ? value.join("..") : value];
    return `#${new URLSearchParams(Object.entries(state).filter(([, value]) => value !== null && value !== "").map(text))}`;
  }

  function write(method) {
    clearTimeout(timer);
    timer = null;
    if (fragment() !== location.hash) history[method](null, "", fragment());
  }

  function notify(before) {
    const changed = Object.keys(state).filter((key) => state[key] !== before[key]);
    if (changed.length) for (const listener of listeners) listener(state, changed);
  }

  addEventListener("popstate", () => {
    const before = state;
    clearTimeout(timer);
    timer = null;
    if (location.hash === "" || location.hash.includes("=")) state = read();
    notify(before);
  });

  return {
    get: () => state,
    // Changes fields of the state; `push` makes a new entry in the history, for choices that the back button undoes. Other
    // changes, such as those while the mouse moves, reach the address a moment later.
    set(patch, { push = false } = {}) {
      const before = state;
      if (push && timer !== null) write("replaceState");
      state = { ...state, ...patch };
      if (push) write("pushState"); else timer ??= setTimeout(() => write("replaceState"), WRITE_DELAY_MS);
      notify(before);
    },
    // Calls listener(state, names of the changed fields) after every change, until the returned function is called.
    subscribe: (listener) => { listeners.add(listener); return () => listeners.delete(listener); },
  };
}
