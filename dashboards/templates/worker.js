// Runs in a worker: unpacks columns and texts, the inverse of memtrace.dashboards.delta_encoding.encode_columns and of
// memtrace.dashboards.text_encoding.encode_json.
function inflate(base64) {
  const deflated = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Response(new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate")));
}

async function unpackColumns({ length, columns, data }) {
  const planes = new Uint8Array(await inflate(data).arrayBuffer());
  const unpacked = {};
  let start = 0;
  for (const [name, width] of columns) {
    const values = new Float64Array(length);
    for (let plane = 0, weight = 1; plane < width; plane++, weight *= 256, start += length) {
      for (let i = 0; i < length; i++) values[i] += planes[start + i] * weight;
    }
    for (let i = 0, sum = 0; i < length; i++) {
      const coded = values[i];
      sum += coded % 2 ? -(coded + 1) / 2 : coded / 2;
      values[i] = sum;
    }
    unpacked[name] = values;
  }
  return unpacked;
}

self.onmessage = async ({ data: { id, packed } }) => {
  try {
    if (packed.json) return self.postMessage({ id, columns: await inflate(packed.json).json() });
    const columns = await unpackColumns(packed);
    return self.postMessage({ id, columns }, Object.values(columns).map((values) => values.buffer));
  } catch (error) {
    return self.postMessage({ id, error: String(error) });
  }
};
