// The tracks: views on one time axis, the range of which is `from` and `to` of the store.

// Indices to draw among low..high (inclusive): the lowest, highest and last value of every bin, in order, so that
// every peak shows and the level between bins is right.
function decimate(x, total, low, high, bins) {
  const all = high - low + 1;
  if (all <= 3 * bins) return Uint32Array.from({ length: all }, (_, i) => low + i);
  const kept = [], width = (x[high] - x[low]) / bins || 1;
  for (let i = low; i <= high;) {
    const edge = x[low] + (Math.floor((x[i] - x[low]) / width) + 1) * width;
    let min = i, max = i, last = i;
    for (; i <= high && (x[i] < edge || i === last); i++) {
      if (total[i] < total[min]) min = i;
      if (total[i] > total[max]) max = i;
      last = i;
    }
    for (const place of [Math.min(min, max), Math.max(min, max), last]) {
      if (place !== kept[kept.length - 1]) kept.push(place);
    }
  }
  return Uint32Array.from(kept);
}

// Fills root with the tracks of the data of a view. Returns a function that draws them again, for another theme.
function mountTracks(root, data, store, colors) {
  const HEIGHT = 320, { curve } = data;
  const tools = make("div", { className: "tools" }), canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Live bytes over time, stacked by category.");
  root.replaceChildren(tools, canvas);

  const visible = () => { const { from, to } = store.get(); return from === null ? data.range : [from, to]; };
  function zoom(range) { // in µs; null: everything
    if (!range) return store.set({ from: null, to: null });
    const [first, last] = data.range, span = Math.min(Math.max(range[1] - range[0], 2), last - first);
    const from = Math.min(Math.max(range[0], first), last - span);
    return store.set(span >= last - first ? { from: null, to: null } : { from: Math.round(from), to: Math.round(from + span) });
  }
  const timeAt = (event) => { const [a, b] = visible(); return a + ((b - a) * event.offsetX) / canvas.clientWidth; };

  function draw() {
    const pen = preparePen(canvas, HEIGHT), width = canvas.clientWidth, [a, b] = visible();
    const low = Math.max(0, lowerBound(curve.time_us, a) - 1);
    const high = Math.min(curve.time_us.length - 1, lowerBound(curve.time_us, b));
    const places = decimate(curve.time_us, data.total, low, high, Math.max(200, Math.round(width / 1.5)));
    const limit = data.top.reduce((most, value) => Math.max(most, value), 1) * 1.05;
    const xOf = (us) => ((us - a) / (b - a || 1)) * width, yOf = (bytes) => HEIGHT - (bytes / limit) * HEIGHT;
    const base = new Float64Array(places.length);
    for (const code of data.stack_order) {
      const { name, color } = data.categories[code];
      pen.fillStyle = color;
      places.forEach((place, k) => {
        const left = xOf(curve.time_us[place]);
        const right = k + 1 < places.length ? xOf(curve.time_us[places[k + 1]]) : width;
        const bytes = curve[name][place];
        if (bytes) pen.fillRect(left, yOf(base[k] + bytes), Math.max(right - left, 0.7), (bytes / limit) * HEIGHT);
        base[k] += bytes;
      });
    }
    const { at } = store.get();
    if (at !== null) { pen.fillStyle = colors().ink; pen.fillRect(xOf(data.timeOfRow(at)), 0, 1.5, HEIGHT); }
    root.dataset.points = String(places.length);
  }

  tools.append(makeButton("Full range", () => zoom(null), "Show the whole recording"));
  canvas.addEventListener("click", (event) => store.set({ show: null, at: data.rowAt(timeAt(event)) }, { push: true }));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [a, b] = visible(), center = timeAt(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
    zoom([center - (center - a) * factor, center + (b - center) * factor]);
  }, { passive: false });
  new ResizeObserver(draw).observe(root);
  store.subscribe(draw);
  draw();
  return draw;
}
