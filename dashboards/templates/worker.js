// Runs in a worker: unpacks columns and texts, the inverse of memtrace.dashboards.delta_encoding.encode_columns and of
// memtrace.dashboards.text_encoding.encode_json.
function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

function inflate(text) {
  return new Response(new Blob([bytesOfBase64(text)]).stream().pipeThrough(new DecompressionStream("deflate")));
}

// Sums up the differences of one column. Values of up to 32 bits need no 64-bit numbers, which are slower.
function unpackColumn(planes, start, length, width, factor, fits) {
  const values = fits ? new Int32Array(length) : new Float64Array(length);
  if (width <= 4) {
    for (let i = 0, sum = 0; i < length; i++) {
      let coded = planes[start + i];
      for (let plane = 1, at = start + length + i; plane < width; plane++, at += length) coded |= planes[at] << (8 * plane);
      sum += (coded >>> 1) ^ -(coded & 1);
      values[i] = sum * factor;
    }
    return values;
  }
  for (let i = 0, sum = 0; i < length; i++) {
    let coded = 0;
    for (let plane = width - 1; plane >= 0; plane--) coded = coded * 256 + planes[start + plane * length + i];
    sum += coded % 2 ? -(coded + 1) / 2 : coded / 2;
    values[i] = sum * factor;
  }
  return values;
}

async function unpackColumns({ length, columns, data }) {
  const planes = new Uint8Array(await inflate(data).arrayBuffer()), unpacked = {};
  let start = 0;
  for (const [name, width, factor, fits] of columns) {
    unpacked[name] = unpackColumn(planes, start, length, width, factor, fits);
    start += width * length;
  }
  return unpacked;
}

globalThis.onmessage = async ({ data: { id, packed } }) => {
  try {
    if (packed.json) return globalThis.postMessage({ id, columns: await inflate(packed.json).json() });
    const columns = await unpackColumns(packed);
    return globalThis.postMessage({ id, columns }, Object.values(columns).map((values) => values.buffer));
  } catch (error) {
    return globalThis.postMessage({ id, error: String(error) });
  }
};
