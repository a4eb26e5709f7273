// The state of the page: what is visible and what is chosen. It is in the fragment of the address (#at=42&color=site), so
// that a link opens the same picture and the back button undoes a choice.
//
//   view    the visible view (rank and device)          from, to  the visible time range in µs; null: all
//   at      event row of the chosen instant; null: none  block     id of the chosen block; null: none
//   show    blocks to list: instant, range, kept         group     module, site, stack, category, operator
//   search  words that blocks must contain               step, module  blocks must belong to them; null: any
//   color   what the colors mean                         section   section to scroll to
const NUMBERS = ["from", "to", "at", "block", "step"], TEXTS = ["view", "show", "group", "search", "module", "color", "section"];

function createStore() {
  const listeners = new Set();
  let state = read();

  function read() {
    const fields = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    const number = (key) => (fields.has(key) && Number.isFinite(Number(fields.get(key))) ? Number(fields.get(key)) : null);
    return Object.fromEntries([...NUMBERS.map((key) => [key, number(key)]), ...TEXTS.map((key) => [key, fields.get(key)])]);
  }

  function fragment() {
    const fields = new URLSearchParams(Object.entries(state).filter(([, value]) => value !== null && value !== ""));
    return `#${fields}`;
  }

  function notify(before) {
    const changed = Object.keys(state).filter((key) => state[key] !== before[key]);
    if (changed.length) for (const listener of listeners) listener(state, changed);
  }

  addEventListener("popstate", () => {
    const before = state;
    if (location.hash === "" || location.hash.includes("=")) state = read();
    notify(before);
  });

  return {
    get: () => state,
    // Changes fields of the state; `push` makes a new entry in the history, for choices that the back button undoes.
    set(patch, { push = false } = {}) {
      const before = state;
      state = { ...state, ...patch };
      if (fragment() !== location.hash) history[push ? "pushState" : "replaceState"](null, "", fragment());
      notify(before);
    },
    // Calls listener(state, names of the changed fields) after every change.
    subscribe: (listener) => { listeners.add(listener); },
  };
}
