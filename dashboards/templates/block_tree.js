// Trees of groups of blocks, for the icicle and flame graphs: by module, by call stack, or one level of groups. Nodes are
// numbers; node 0 is the root and parents precede their children.

const GROUPS = [["module", "module"], ["stack", "call stack"], ["callee", "inverted call stack"],
  ["site", "allocation site"], ["category", "category"], ["operator", "operator"], ["name", "tensor"]];
const OUTSIDE_MODULES = "outside any module";
const hierarchies = new WeakMap(); // data -> map of group and frames -> hierarchy

// { parent, label, title, nodeOfKind }: parent, short and full text by node, and the node of each kind of block.
function hierarchyOf(data, group, onlyOwnFrames) {
  if (!hierarchies.has(data)) hierarchies.set(data, new Map());
  const known = hierarchies.get(data), key = `${group} ${onlyOwnFrames}`;
  if (!known.has(key)) known.set(key, makeHierarchy(data, group, onlyOwnFrames));
  return known.get(key);
}

function makeHierarchy(data, group, onlyOwnFrames) {
  if (group === "stack" || group === "callee") return stackHierarchy(data, group === "callee", onlyOwnFrames);
  const fields = blockFields(data), tree = createTree();
  const pathOf = group === "module"
    ? (k) => (fields.module.ofKind(k) || OUTSIDE_MODULES).split(".") : (k) => [fields[group].ofKind(k) || `no ${fields[group].label}`];
  const nodeOfKind = Int32Array.from(data.kinds.size, (_, k) => tree.add(pathOf(k)));
  const { parent, part } = tree, title = [...part];
  if (group === "module") for (let node = 1; node < part.length; node++) if (parent[node] > 0) title[node] = `${title[parent[node]]}.${part[node]}`;
  return { parent, label: part, title, nodeOfKind };
}

// Frames of the stacks, outermost first or innermost first; stacks without a frame have a group of their own.
function stackHierarchy(data, isInverted, onlyOwnFrames) {
  const tree = createTree();
  const reasonNodes = data.no_stack_reasons.map((reason) => tree.add([`no call stack: ${reason}`]));
  const nodeOfStack = Array.from(data.stacks.node, (_, stack) => {
    const frames = framesOfStack(data, stack), shown = onlyOwnFrames ? frames.filter((frame) => isOwnFrame(data, frame)) : frames;
    if (!frames.length) return 0;
    if (!shown.length) return tree.add(["no frame of your own code"]);
    return tree.add(isInverted ? shown : shown.reverse());
  });
  const textBy = (make) => tree.part.map((frame) => (typeof frame === "number" ? make(data, frame) : frame));
  return { parent: tree.parent, label: textBy(shortFrameText), title: textBy(frameText),
    nodeOfKind: Int32Array.from(data.kinds.stack, (stack, k) => nodeOfStack[stack] || reasonNodes[data.kinds.no_stack_reason[k]] || 0) };
}

function createTree() {
  const parent = [-1], part = [""], children = [new Map()];
  function add(path) { // returns the node of the last part
    let node = 0;
    for (const name of path) {
      let child = children[node].get(name);
      if (child === undefined) {
        child = parent.push(node) - 1;
        part.push(name);
        children.push(new Map());
        children[node].set(name, child);
      }
      node = child;
    }
    return node;
  }
  return { parent, part, add };
}

// Sums of some blocks over a hierarchy, by node: bytes, count, and bytes by group of color.
function sumTree(data, { parent, nodeOfKind }, indices, { codeOfKind }) {
  const { kind, size } = data.blocks;
  const kindBytes = new Float64Array(nodeOfKind.length), kindCount = new Float64Array(nodeOfKind.length);
  for (const i of indices) {
    kindBytes[kind[i]] += size[i];
    kindCount[kind[i]]++;
  }
  const bytes = new Float64Array(parent.length), count = new Float64Array(parent.length), byColor = parent.map(() => null);
  const add = (node, numBytes, number) => { bytes[node] += numBytes; count[node] += number; };
  const addColor = (node, index, numBytes) => {
    byColor[node] ??= new Map();
    byColor[node].set(index, (byColor[node].get(index) ?? 0) + numBytes);
  };
  kindCount.forEach((number, k) => {
    if (!number) return;
    add(nodeOfKind[k], kindBytes[k], number);
    addColor(nodeOfKind[k], codeOfKind[k], kindBytes[k]);
  });
  for (let node = parent.length - 1; node > 0; node--) { // parents precede their children
    if (!count[node]) continue;
    add(parent[node], bytes[node], count[node]);
    for (const [index, numBytes] of byColor[node]) addColor(parent[node], index, numBytes);
  }
  return { bytes, count, byColor };
}
