// The data of a view, unpacked: payloads of memtrace.dashboards.payload, from the page itself.
function createSource() {
  const code = document.getElementById("worker").textContent;
  const worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  const waiting = new Map(); // id of a request to the worker -> [resolve, reject]
  const loaded = new Map(); // view -> promise of its data
  let numRequests = 0;
  worker.onmessage = ({ data: { id, columns, error } }) => {
    const [resolve, reject] = waiting.get(id);
    waiting.delete(id);
    if (error) reject(new Error(error)); else resolve(columns);
  };
  const unpack = (packed) => new Promise((resolve, reject) => {
    waiting.set(++numRequests, [resolve, reject]);
    worker.postMessage({ id: numRequests, packed });
  });

  const embedded = (view) => JSON.parse(document.getElementById(`payload-${view}`).textContent);
  async function open({ packed, plain }) {
    const names = Object.keys(packed);
    const columns = await Promise.all(names.map((name) => unpack(packed[name])));
    return describeData({ ...plain, ...Object.fromEntries(names.map((name, i) => [name, columns[i]])) });
  }

  return {
    // The data of a view; the same promise at every call.
    load(view) {
      if (!loaded.has(view)) loaded.set(view, open(embedded(view)));
      return loaded.get(view);
    },
    unpack: open, // data of a payload from elsewhere
  };
}

// Adds what every widget asks of the data: sums of the curve, and rows of times and times of rows.
function describeData(data) {
  const { curve } = data, length = curve.time_us.length;
  const names = data.stack_order.map((code) => data.categories[code].name);
  const total = new Float64Array(length), top = new Float64Array(length);
  for (const name of names) for (let i = 0; i < length; i++) total[i] += curve[name][i];
  for (let i = 0; i < length; i++) top[i] = Math.max(total[i], curve.allocated?.[i] ?? 0, curve.reserved?.[i] ?? 0);
  const placeOfRow = (row) => Math.max(0, lowerBound(curve.event, row + 1) - 1);
  const placeAt = (us) => Math.max(0, lowerBound(curve.time_us, us + 1) - 1);
  return {
    ...data, total, top, placeOfRow, placeAt,
    range: [Math.min(0, curve.time_us[0]), curve.time_us[length - 1]], // µs
    timeOfRow: (row) => curve.time_us[placeOfRow(row)],
    rowAt: (us) => curve.event[placeAt(us)],
  };
}
