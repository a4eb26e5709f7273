// What a block can be searched, sorted and colored by: one home for the fields of queries, table columns and colors.
// A field has a value of the kind (`ofKind`) or of the block itself (`ofBlock`). Text fields are empty where unknown, number
// fields -1.

const FIELD_ALIASES = { op: "operator", line: "site", file: "site", tensor: "name", frame: "stack", life: "lifetime", id: "block" };

function blockFields(data) {
  const { kinds, blocks } = data;
  const text = (label, ofKind) => ({ label, type: "text", ofKind });
  const number = (label, unit, value) => ({ label, type: "number", unit, ...value });
  const stackTexts = new Map();
  const stackText = (stack) => {
    if (!stackTexts.has(stack)) stackTexts.set(stack, framesOfStack(data, stack).map((frame) => frameText(data, frame)).join("\n"));
    return stackTexts.get(stack);
  };
  return {
    category: text("category", (k) => data.categories[kinds.category[k]].label),
    module: text("module", (k) => data.modules[kinds.module[k]]),
    operator: text("operator", (k) => data.operators[kinds.operator[k]]),
    site: text("allocation site", (k) => data.sites[data.siteOfKind[k]]),
    name: text("tensor", (k) => data.names[kinds.name[k]]),
    phase: text("phase", (k) => data.phase_names[kinds.phase[k]] ?? ""),
    stream: text("stream", (k) => (kinds.stream[k] < 0 ? "" : String(kinds.stream[k]))),
    freed: text("freed by", (k) => data.operators[kinds.free_operator[k]]),
    stack: text("call stack", (k) => stackText(kinds.stack[k])),
    size: number("size", "bytes", { ofKind: (k) => kinds.size[k] }),
    allocated: number("allocated size", "bytes", { ofKind: (k) => kinds.allocated_size[k] }),
    reads: number("reads", "", { ofKind: (k) => (data.has_accesses ? kinds.num_reads[k] : -1) }),
    writes: number("writes", "", { ofKind: (k) => (data.has_accesses ? kinds.num_writes[k] : -1) }),
    step: number("step", "", { ofBlock: (i) => blocks.step[i] }),
    lifetime: number("lifetime", "time", { ofBlock: (i) => lifetimeOf(blocks, i) }),
    time: number("allocation time", "time", { ofBlock: (i) => blocks.begin_us[i] }),
    block: number("block", "", { ofBlock: (i) => blocks.block[i] }),
    address: number("address", "", { ofBlock: (i) => blocks.address[i] }),
  };
}

const QUERY_FIELDS = ["category", "module", "operator", "site", "name", "phase", "stream", "freed", "stack", "size", "allocated",
  "reads", "writes", "step", "lifetime", "time", "block", "address"];
// Fields that words without a field are searched in.
const WORD_FIELDS = ["name", "module", "operator", "site", "category"];
