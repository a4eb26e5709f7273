// The axis that all tracks share. Positions on it are times in µs or rows of events; both count from left to right.
// The store has the visible range in µs in either case, so that other figures can follow it.

// Times that rise strictly: events of one microsecond are spread evenly over it.
function spreadTimes(times) {
  const spread = Float64Array.from(times);
  for (let first = 0; first < times.length;) {
    let end = first + 1;
    while (end < times.length && times[end] <= times[first]) end++;
    for (let i = first + 1; i < end; i++) spread[i] = times[first] + (i - first) / (end - first);
    first = end;
  }
  return spread;
}

// The value at x of the line through the points (from[i], to[i]); both rise, and the ends continue with slope 1.
function interpolate(from, to, x) {
  const last = from.length - 1;
  if (x <= from[0]) return to[0] + (x - from[0]);
  if (x >= from[last]) return to[last] + (x - from[last]);
  const i = lowerBound(from, x), width = from[i] - from[i - 1];
  return width > 0 ? to[i - 1] + ((x - from[i - 1]) / width) * (to[i] - to[i - 1]) : to[i];
}

// The largest item of every pixel column: for each of `count` equal intervals of [a, b], the index of the highest value
// of the step function (positions[i], values[i]), including the value that holds when the interval begins.
function highestPerColumn(positions, values, a, b, count) {
  const highest = new Int32Array(count), width = (b - a) / count;
  let i = Math.max(0, lowerBound(positions, a + 0) - 1);
  if (i + 1 < positions.length && positions[i + 1] <= a) i++;
  for (let column = 0; column < count; column++) {
    const edge = a + (column + 1) * width;
    let best = i;
    while (i + 1 < positions.length && positions[i + 1] < edge) {
      i++;
      if (values[i] > values[best]) best = i;
    }
    highest[column] = best;
  }
  return highest;
}

function createAxis(data, store) {
  const { curve } = data, times = curve.time_us, rows = curve.event;
  const isByEvent = () => (store.get().axis ?? (data.has_times ? "time" : "event")) === "event";
  const full = () => (isByEvent() ? [rows[0], Math.max(rows[rows.length - 1], rows[0] + 1)] : [data.range[0], Math.max(data.range[1], data.range[0] + 1)]);
  const positionOfTime = (us) => (isByEvent() ? interpolate(times, rows, us) : us);
  const timeOfPosition = (position) => (isByEvent() ? interpolate(rows, times, position) : position);

  function visible() {
    const { from, to } = store.get();
    return from === null || to === null || to <= from ? full() : [positionOfTime(from), positionOfTime(to)];
  }

  // Shows a range of positions, moved into the recording; null: everything.
  function show(range, options) {
    const [first, last] = full();
    const smallest = isByEvent() ? 2 : Math.min(1, (last - first) / 2);
    const span = range ? Math.max(range[1] - range[0], smallest) : Infinity;
    if (span >= (last - first) * 0.9999) return store.set({ from: null, to: null }, options);
    const middle = (range[0] + range[1]) / 2;
    const start = Math.min(Math.max(middle - span / 2, first), last - span);
    const round = (us) => Math.round(us * 1000) / 1000;
    return store.set({ from: round(timeOfPosition(start)), to: round(timeOfPosition(start + span)) }, options);
  }

  // Positions of the starts or ends of many spans, by both axes; unknown ones (-1) are `otherwise`.
  function positionsOf(timesOfSpans, otherwise) {
    return Float64Array.from(timesOfSpans, (us) => (us < 0 && otherwise !== undefined ? otherwise : positionOfTime(us)));
  }

  return {
    isByEvent, full, visible, show, positionOfTime, timeOfPosition, positionsOf,
    positions: () => (isByEvent() ? rows : times),
    positionOfRow: (row) => (isByEvent() ? row : data.timeOfRow(row)),
    rowAt: (position) => data.rowAt(timeOfPosition(position)),
  };
}

// Steps of 1, 2 or 5 times a power of ten, at least as long as `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999999);
}

// Ticks of a range of positions: [{ position, text }], at most one in `spacing` pixels.
function axisTicks(axis, width, spacing) {
  const [a, b] = axis.visible(), step = Math.max(niceStep(((b - a) / width) * spacing), axis.isByEvent() ? 1 : 0);
  const ticks = [];
  for (let n = Math.ceil(a / step); n * step <= b; n++) {
    const position = n * step;
    ticks.push({ position, text: axis.isByEvent() ? (Math.round(position) + 0).toLocaleString("en-US") : formatTick(position, step, b) });
  }
  return ticks;
}

// A time in the unit of `largest`, with the digits that tell neighboring ticks apart.
function formatTick(us, step, largest) {
  const [divisor, unit] = largest >= 1e6 ? [1e6, "s"] : largest >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, Math.ceil(Math.log10(divisor / step) - 1e-9));
  return `${(us / divisor + 0).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

// Values of bytes for the ticks of an axis from 0 to `limit`: multiples of a power of two, at most `most` of them.
function byteTicks(limit, most) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(limit / most)));
  return Array.from({ length: Math.floor(limit / step) + 1 }, (_, n) => n * step);
}
