// Trees of groups of blocks, for the icicle and flame graphs: by module, by call stack, or one level of groups. Nodes are
// numbers; node 0 is the root and parents precede their children.

const GROUPS = [["module", "module"], ["stack", "call stack"], ["callee", "call stack from the allocation"],
  ["site", "allocation site"], ["category", "category"], ["operator", "operator"], ["name", "tensor"]];
const hierarchies = new WeakMap(); // data -> map of group and frames -> hierarchy

// { parent, label, title, nodeOfKind, key }: labels and titles by node, the node of each kind of block, and for each node a
// number that names it in the address (a module: its path).
function hierarchyOf(data, group, onlyOwnFrames) {
  if (!hierarchies.has(data)) hierarchies.set(data, new Map());
  const known = hierarchies.get(data), key = `${group} ${onlyOwnFrames}`;
  if (!known.has(key)) known.set(key, makeHierarchy(data, group, onlyOwnFrames));
  return known.get(key);
}

function makeHierarchy(data, group, onlyOwnFrames) {
  const { kinds } = data, fields = blockFields(data);
  if (group === "stack" || group === "callee") return stackHierarchy(data, group === "callee", onlyOwnFrames);
  const paths = group === "module" ? (k) => (fields.module.ofKind(k) || "(outside any module)").split(".")
    : (k) => [fields[group].ofKind(k) || `(no ${fields[group].label})`];
  const builder = createTree((part, parentPath) => (parentPath && group === "module" ? `${parentPath}.${part}` : part));
  const nodeOfKind = Int32Array.from(kinds.size, (_, k) => builder.add(paths(k)));
  return { ...builder.tree(), nodeOfKind };
}

// Frames of the stacks, outermost first or innermost first; stacks without a frame have a group of their own.
function stackHierarchy(data, isInverted, onlyOwnFrames) {
  const builder = createTree((frame) => (frame === -1 ? "(no call stack)" : frame === -2 ? "(no frame of your own code)" : frame));
  const nodeOfStack = Int32Array.from(data.stacks.node, (_, stack) => {
    const frames = framesOfStack(data, stack), shown = onlyOwnFrames ? frames.filter((frame) => isOwnFrame(data, frame)) : frames;
    if (!shown.length) return builder.add([frames.length ? -2 : -1]);
    return builder.add(isInverted ? shown : shown.reverse());
  });
  const { parent, label, key } = builder.tree();
  const text = (make) => label.map((frame) => (typeof frame === "number" ? make(data, frame) : frame));
  return { parent, key, label: text(shortFrameText), title: text(frameText), nodeOfKind: Int32Array.from(data.kinds.stack, (stack) => nodeOfStack[stack]) };
}

function createTree(labelOf) {
  const parent = [-1], label = [""], title = [""], children = [new Map()];
  return {
    add(path) { // returns the node of the last part
      let node = 0;
      for (const part of path) {
        let child = children[node].get(part);
        if (child === undefined) {
          child = parent.length;
          parent.push(node);
          label.push(labelOf(part, "") ?? part);
          title.push(labelOf(part, title[node]));
          children.push(new Map());
          children[node].set(part, child);
        }
        node = child;
      }
      return node;
    },
    tree: () => ({ parent: Int32Array.from(parent), label, title, key: title }),
  };
}

// Sums of some blocks over a hierarchy: bytes, count and bytes by class of color, by node.
function sumTree(data, hierarchy, indices, coloring) {
  const { kind, size } = data.blocks, { parent, nodeOfKind } = hierarchy, numClasses = coloring.classes.length;
  const kindBytes = new Float64Array(nodeOfKind.length), kindCount = new Float64Array(nodeOfKind.length);
  for (const i of indices) {
    kindBytes[kind[i]] += size[i];
    kindCount[kind[i]]++;
  }
  const bytes = new Float64Array(parent.length), count = new Float64Array(parent.length);
  const byClass = Array.from({ length: parent.length }, () => null);
  const addClass = (node, index, value) => {
    byClass[node] ??= new Map();
    byClass[node].set(index, (byClass[node].get(index) ?? 0) + value);
  };
  kindCount.forEach((number, k) => {
    if (!number) return;
    bytes[nodeOfKind[k]] += kindBytes[k];
    count[nodeOfKind[k]] += number;
    addClass(nodeOfKind[k], Math.min(coloring.classOfKind[k], numClasses - 1), [kindBytes[k], number]);
  });
  return { bytes, count, byClass };
}
