// Text of numbers, and small helpers for elements. Text from a trace enters the document only through textContent and
// fillText.

// The twin of memtrace.units.format_bytes; tests/dashboards/test_page.py compares them.
function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  // 1023.96 KiB would round to 1,024 KiB.
  while (power + 1 < units.length && Number((Math.abs(bytes) / 1024 ** power).toFixed(1)) >= 1024) power++;
  const scaled = bytes / 1024 ** power, size = Math.abs(scaled);
  const digits = power === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${scaled.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${units[power]}`;
}

function formatTime(us) { // empty: unknown
  if (us === null || us < 0) return "";
  const [divisor, unit] = us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  return `${(us / divisor).toLocaleString("en-US", { maximumSignificantDigits: 4 })} ${unit}`;
}

const formatCount = (number, noun, plural = `${noun}s`) => `${number.toLocaleString("en-US")} ${number === 1 ? noun : plural}`;

function formatPercent(share) {
  const percent = 100 * share;
  return percent > 0 && percent < 0.1 ? "< 0.1 %" : `${percent.toLocaleString("en-US", { maximumFractionDigits: percent < 10 ? 1 : 0 })} %`;
}

// Offers a table as a file. Text that a spreadsheet would run as a formula gets a quotation mark in front.
function saveCsv(name, head, rows) {
  const cell = (value) => (typeof value === "number" ? String(value) : `"${value.replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`);
  const text = [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n");
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function makeButton(text, act, title = "") {
  const made = make("button", { type: "button", textContent: text, title });
  made.addEventListener("click", () => act(made));
  return made;
}

function makeChoice(label, options, value, act) { // options: [[value, text], ...]
  const select = make("select", {}, ...options.map(([key, text]) => make("option", { value: key, textContent: text })));
  select.value = value;
  select.addEventListener("change", () => act(select.value));
  return make("label", {}, `${label} `, select);
}

// A canvas of the width of its element, in the resolution of the screen: sets its height and returns its context, scaled
// to CSS pixels.
function preparePen(canvas, height) {
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

function lowerBound(sorted, value) { // index of the first entry that is not below value
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}
