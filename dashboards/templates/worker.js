// Runs in a worker: unpacks columns, the inverse of memtrace.dashboards.delta_encoding.encode_columns.
async function unpackColumns({ length, columns, data }) {
  const deflated = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
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
    const columns = await unpackColumns(packed);
    self.postMessage({ id, columns }, Object.values(columns).map((values) => values.buffer));
  } catch (error) {
    self.postMessage({ id, error: String(error) });
  }
};
