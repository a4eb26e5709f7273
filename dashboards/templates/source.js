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
    return describeData(describeBlocks({ ...plain, ...Object.fromEntries(names.map((name, i) => [name, columns[i]])) }));
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

// Adds what every widget asks of the data: sums of the curve, and rows of times and times of rows. Makes the times of the
// curve rise strictly.
function describeData(data) {
  const curve = { ...data.curve, time_us: spreadTimes(data.curve.time_us) }, length = curve.time_us.length;
  const names = data.stack_order.map((code) => data.categories[code].name);
  const total = new Float64Array(length), top = new Float64Array(length);
  for (const name of names) for (let i = 0; i < length; i++) total[i] += curve[name][i];
  for (let i = 0; i < length; i++) top[i] = Math.max(total[i], curve.allocated?.[i] ?? 0, curve.reserved?.[i] ?? 0);
  const places = new Int32Array(data.num_rows + 2); // place in the curve of each row of events, from row -1
  for (let row = -1, place = 0; row <= data.num_rows; row++) {
    while (place + 1 < length && curve.event[place + 1] <= row) place++;
    places[row + 1] = place;
  }
  const placeOfRow = (row) => places[Math.min(Math.max(row, -1), data.num_rows) + 1];
  const placeAt = (us) => { const place = lowerBound(curve.time_us, us); return Math.max(0, curve.time_us[place] === us ? place : place - 1); };
  return {
    ...data, curve, total, top, placeOfRow, placeAt,
    range: [curve.time_us[0], curve.time_us[length - 1]], // µs
    timeOfRow: (row) => curve.time_us[placeOfRow(row)],
    rowAt: (us) => curve.event[placeAt(us)],
    scope: "trace", // what the data cover, in texts
    eventText: (row) => `event ${row.toLocaleString("en-US")}`,
  };
}
