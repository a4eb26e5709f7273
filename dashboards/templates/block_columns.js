// The blocks of a payload (memtrace.dashboards.explorer). Rows are rows of the events table, times are µs, -1 is unknown.
// What many blocks have in common is a column of `kinds`; `blocks.kind` is the row there.

// Adds to unpacked data: blocks.end_row, end_us, free_step, size, category and stack (by block), and texts by index.
function describeBlocks(data) {
  const { kinds, stacks } = data, { kind, live_rows, begin_us, end, free_steps, step, ...rest } = data.blocks;
  const length = kind.length, { block, begin_row, address } = rest;
  const end_row = new Float64Array(length), end_us = new Float64Array(length), free_step = new Float64Array(length);
  const size = new Float64Array(length), category = new Uint8Array(length), stack = new Int32Array(length);
  for (let i = 0; i < length; i++) {
    end_row[i] = begin_row[i] + live_rows[i];
    end_us[i] = begin_us[i] >= 0 && end[i] >= 0 ? begin_us[i] + end[i] : end[i];
    free_step[i] = free_steps[i] === -2 ? -1 : step[i] + free_steps[i];
    size[i] = kinds.size[kind[i]];
    category[i] = kinds.category[kind[i]];
    stack[i] = kinds.stack[kind[i]];
  }
  const blocks = { block, kind, begin_row, end_row, begin_us, end_us, step, free_step, address, size, category, stack };
  return { ...data, ...data.block_texts, blocks, siteOfKind: Float64Array.from(kinds.stack, (index) => stacks.site[index]) };
}

// How long a block lives in µs; -1: unknown.
function lifetimeOf(blocks, i) {
  return blocks.end_us[i] < 0 || blocks.begin_us[i] < 0 ? -1 : blocks.end_us[i] - blocks.begin_us[i];
}

// Index of the block with an id; -1: not on this page. Ids rise with the order of allocation except for those of windows.
function indexOfBlock(blocks, id) {
  return id === null ? -1 : blocks.block.indexOf(id);
}

// Texts of a frame by its index: `file:line function`.
function frameText(data, frame) {
  const { file, line, function: name, files, functions } = data.frames;
  const place = line[frame] > 0 ? `${files[file[frame]]}:${line[frame]}` : files[file[frame]];
  return place ? `${place} ${functions[name[frame]]}` : functions[name[frame]];
}

// The same without the outer folders, which is enough to recognise a file.
function shortFrameText(data, frame) {
  const { file, line, function: name, files, functions } = data.frames;
  const path = files[file[frame]].split("/").slice(-2).join("/");
  const place = line[frame] > 0 ? `${path}:${line[frame]}` : path;
  return !path || path === "??" ? functions[name[frame]] : `${place} ${functions[name[frame]]}`;
}

// Frames of a call stack, innermost first.
function framesOfStack(data, stack) {
  const { parent, frame } = data.frame_tree, frames = [];
  for (let node = data.stacks.node[stack]; node > 0; node = parent[node]) frames.push(frame[node]);
  return frames;
}

const OWN = 0; // index into memtrace.dashboards.stack_encoding.OWNERS
const isOwnFrame = (data, frame) => data.frames.owner[frame] === OWN;
