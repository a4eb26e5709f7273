// The query language of the explorer: words, and terms such as `module:layers.3 size:>1MiB -category:activations,gradients`.
//
//   word              a name, module, operator, allocation site or category contains it
//   field:a,b         the field contains a or b; a number at the end of a is not continued (layers.3 is not layers.30)
//   field:=text       the field is this text
//   field:>=1MiB      numbers: >, >=, <, <=, =, and a..b with both ends
//   -term             the opposite
//   "two words"       a text with spaces; \" and \\ inside
// Upper and lower case are the same. A block matches if it matches all terms.

const UNITS = {
  bytes: { "": 1, b: 1, k: 1024, kib: 1024, m: 1024 ** 2, mib: 1024 ** 2, g: 1024 ** 3, gib: 1024 ** 3, t: 1024 ** 4, tib: 1024 ** 4,
    kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 },
  time: { "": 1, ns: 1e-3, us: 1, "µs": 1, ms: 1e3, s: 1e6, min: 6e7 },
};
const QUOTED = String.raw`"(?:[^"\\]|\\.)*"?`;

// Returns { terms, problems }: terms have the text they come from; problems are sentences about terms that are ignored.
function parseQuery(query) {
  const terms = [], problems = [];
  for (const source of query.match(new RegExp(`(?:[^\\s"]|${QUOTED})+`, "g")) ?? []) {
    const negated = source.length > 1 && source.startsWith("-"), rest = negated ? source.slice(1) : source;
    const match = /^([a-z]+):(.*)$/is.exec(rest), name = match?.[1].toLowerCase();
    const field = FIELD_ALIASES[name] ?? name, term = { source, negated };
    if (!match || !QUERY_FIELDS.includes(field)) {
      const word = unquote(rest).toLowerCase();
      if (word) terms.push({ ...term, word });
      continue;
    }
    const tests = (match[2].match(new RegExp(`(?:[^,"]|${QUOTED})+`, "g")) ?? [""]).map((value) => parseTest(field, value));
    if (tests.includes(null)) problems.push(`${source}: ${numberHelp(field)}`);
    else terms.push({ ...term, field, tests });
  }
  return { terms, problems };
}

function unquote(text) {
  return text.replace(new RegExp(QUOTED, "g"), (quoted) => quoted.replace(/^"|"$/g, "").replace(/\\(.)/gs, "$1"));
}

const NUMBER_UNITS = { size: "bytes", allocated: "bytes", lifetime: "time", time: "time", reads: "", writes: "", step: "", block: "", address: "" };
const numberHelp = (field) => `${field} needs ${{ bytes: "bytes such as >1MiB", time: "a time such as <2ms", "": "a number such as 3 or 2..5" }[NUMBER_UNITS[field]]}.`;

// A test of one value: { exact } or { part } of a text, { low, high } of a number with open ends; null: not a number.
function parseTest(field, value) {
  if (!(field in NUMBER_UNITS)) {
    return value.startsWith("=") ? { exact: unquote(value.slice(1)).toLowerCase() } : { part: unquote(value).toLowerCase() };
  }
  const unit = NUMBER_UNITS[field], [, operator, first, second] = /^(>=|<=|>|<|=)?(.*?)(?:\.\.(.*))?$/s.exec(unquote(value));
  const low = parseNumber(first, unit), high = second === undefined ? low : parseNumber(second, unit);
  if (low === null || high === null || (operator && second !== undefined)) return null;
  const never = { lowOpen: false, highOpen: false };
  if (operator === ">" || operator === ">=") return { ...never, low, high: Infinity, lowOpen: operator === ">" };
  if (operator === "<" || operator === "<=") return { ...never, low: 0, high: low, highOpen: operator === "<" };
  return { ...never, low, high };
}

function parseNumber(text, unit) {
  const match = /^\s*(0x[0-9a-f]+|\d+(?:\.\d*)?(?:e\d+)?|\.\d+)\s*([a-zµ]*)\s*$/i.exec(text.replace(/(\d),(?=\d{3})/g, "$1"));
  const factor = match && (unit ? UNITS[unit] : { "": 1 })[match[2].toLowerCase()];
  return factor === undefined || factor === null ? null : Number(match[1]) * factor;
}

const isDigit = (character) => character >= "0" && character <= "9";
function containsValue(text, value) { // both in lower case
  if (value === "") return text === "";
  for (let at = text.indexOf(value); at >= 0; at = text.indexOf(value, at + 1)) {
    const before = text[at - 1], after = text[at + value.length];
    if (!(isDigit(value[0]) && isDigit(before)) && !(isDigit(value[value.length - 1]) && isDigit(after))) return true;
  }
  return false;
}

function passesTest(test, value) {
  if (test.exact !== undefined) return value === test.exact;
  if (test.part !== undefined) return containsValue(value, test.part);
  return value >= 0 && (test.lowOpen ? value > test.low : value >= test.low) && (test.highOpen ? value < test.high : value <= test.high);
}

// Returns a function that says whether the block with an index matches all terms. Terms on kinds are decided once per kind.
function compileQuery(terms, fields, kindOf, numKinds) {
  const lower = (field, k) => fields[field].ofKind(k).toLowerCase();
  const passes = (term, value) => term.tests.some((test) => passesTest(test, value)) !== term.negated;
  const isKindTerm = (term) => term.word !== undefined || fields[term.field].ofKind;
  const ofKinds = terms.filter(isKindTerm), ofBlocks = terms.filter((term) => !isKindTerm(term));
  const kindPasses = Uint8Array.from({ length: numKinds }, (_, k) => Number(ofKinds.every((term) => {
    if (term.word !== undefined) return WORD_FIELDS.some((field) => lower(field, k).includes(term.word)) !== term.negated;
    return passes(term, fields[term.field].type === "text" ? lower(term.field, k) : fields[term.field].ofKind(k));
  })));
  return (i) => kindPasses[kindOf[i]] === 1 && ofBlocks.every((term) => passes(term, fields[term.field].ofBlock(i)));
}

// The query with one more term, or without it if it has it.
function toggleTerm(query, field, value) {
  const source = `${field}:=${/^[^\s",\\]+$/.test(value) ? value : `"${value.replace(/["\\]/g, "\\$&")}"`}`;
  const sources = parseQuery(query).terms.map((term) => term.source);
  return (sources.includes(source) ? sources.filter((other) => other !== source) : [...sources, source]).join(" ");
}
