// Opens a snapshot with the code of PyTorch's viewer: node viewer.cjs SNAPSHOT DEVICE MemoryViz.js [more scripts]
// Prints what the viewer computes for "Active Memory Timeline" and "Allocator State History". Nothing is drawn: d3 is
// replaced by an object on which every call and every property is that object again.
const fs = require('node:fs');

const [snapshotPath, deviceText, ...scripts] = process.argv.slice(2);
const nothing = new Proxy(function () {}, {
  get: (_target, key) => (key === Symbol.toPrimitive ? () => 0 : nothing),
  apply: () => nothing,
});
const source = scripts
  .map(path => fs.readFileSync(path, 'utf8'))
  .join('\n')
  .replace(/^import [\s\S]*?from\s*["'].*?["'];?$/gm, '')
  .replace(/^export \{[\s\S]*?\};?$/gm, '')
  .replace(/^export (default )?/gm, '');

const main = `
{
const content = fs.readFileSync(snapshotPath);
const log = console.log;
console.log = () => {};
const snapshot = unpickle_and_annotate(
  content.buffer.slice(content.byteOffset, content.byteOffset + content.byteLength));
const device = Number(deviceText);
const timeline = process_alloc_data(snapshot, device, false, 1000000);
const segments = process_alloc_data(snapshot, device, true, 1000000);
const memoryView = MemoryView(nothing, StackInfo(nothing), snapshot, device);
const events = snapshot.device_traces[device];
const stride = Math.max(1, Math.floor(events.length / 50));
const states = [];
for (let i = 0; i < events.length; i += stride) states.push([i, ...memoryView.draw(i)]);
log(JSON.stringify({
  max_size: timeline.max_size,
  elements: timeline.elements_length,
  max_segments: segments.max_size,
  categories: snapshot.categories,
  context: timeline.context_for_id(0),
  states,
  events: events.length,
}));
}
`;
const names = ['d3', 'axisLeft', 'scaleLinear', 'zoom', 'zoomIdentity', 'brushX', 'document', 'window'];
new Function('fs', 'nothing', 'snapshotPath', 'deviceText', ...names, source + main)(
  fs, nothing, snapshotPath, deviceText, ...names.map(() => nothing));
