#include "machine.h"

#include "utf8.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pickles are little-endian, and are read in place");

namespace memtrace {

namespace {

constexpr size_t kMaxMemoGap = 1 << 20;
constexpr size_t kPrefixBytes = 512;
constexpr const char* kNoList = "elements without a list";
constexpr ptrdiff_t kMaxRunBytes = 1 << 16;
constexpr ptrdiff_t kMaxValueBytes = 10;  // of the opcodes of `push_values`, read as whole words
constexpr const char* kNotMemoized = "a reference to a value that was not memoized";

template <class T>
T read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Returns a little-endian integer of 1 to 7 bytes, behind which the memory goes on up to the eighth.
int64_t read_short_integer(const uint8_t* at, unsigned count) {
  const unsigned unused_bits = 64 - 8 * count;
  return static_cast<int64_t>(read<uint64_t>(at) << unused_bits) >> unused_bits;
}

double read_big_endian_double(const uint8_t* at) {
  const uint64_t bits = __builtin_bswap64(read<uint64_t>(at));
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace

void Machine::feed(const uint8_t* data, size_t count) {
  const uint64_t start = num_bytes_;
  num_bytes_ += count;
  if (is_done_) return;
  size_t used = 0;
  while (!pending_.empty() && used < count) {
    // Most opcodes are short; for a long text, the whole chunk is needed.
    const size_t before = pending_.size();
    const size_t added = before < kPrefixBytes && count - used > kPrefixBytes ? kPrefixBytes : count - used;
    pending_.append(data + used, added);
    chunk_begin_ = pending_.data();
    chunk_start_ = start + used - before;
    const size_t done = static_cast<size_t>(run(pending_.data(), pending_.end()) - pending_.data());
    if (is_done_) return;
    if (done >= before) {
      used += done - before;
      pending_.shrink(0);
    } else {
      used += added;
      pending_.drop_front(done);
    }
  }
  if (used == count) return;
  chunk_begin_ = data;
  chunk_start_ = start;
  const uint8_t* end = data + count;
  const uint8_t* rest = run(data + used, end);
  if (!is_done_) pending_.append(rest, static_cast<size_t>(end - rest));
}

const uint8_t* Machine::run(const uint8_t* at, const uint8_t* end) {
  while (at < end && !is_done_) {
    at = push_values(at, end);
    const uint8_t* next = run_opcode(*at, at + 1, end);
    if (next == nullptr) return at;
    at = next;
  }
  return at;
}

// Most opcodes push a value and follow one another: keys and values of a dict, and the frames of a call stack, which
// are references to the memo. The comparisons are in the order of how often an opcode appears.
const uint8_t* Machine::push_values(const uint8_t* at, const uint8_t* end) {
  if (end - at > kMaxRunBytes) end = at + kMaxRunBytes;  // a chunk that ends within a long text is long
  if (end - at <= kMaxValueBytes) return at;
  const uint8_t* const last = end - kMaxValueBytes;
  stack_.reserve_more(static_cast<size_t>(end - at));
  const Word* const memo = memo_.data();
  const size_t memo_size = memo_.size();
  Word* top = stack_.end();
  while (at < last) {
    const uint8_t opcode = *at;
    size_t number;
    if (opcode == 'j') {  // LONG_BINGET
      number = read<uint32_t>(at + 1);
      at += 5;
    } else if (opcode == 'h') {  // BINGET
      number = at[1];
      at += 2;
    } else {
      if (opcode == 'K') {  // BININT1
        *top++ = make_word(kInt, at[1]);
        at += 2;
      } else if (opcode == 'J') {  // BININT
        *top++ = make_word(kInt, static_cast<uint64_t>(int64_t{read<int32_t>(at + 1)}));
        at += 5;
      } else if (opcode == 0x8a && at[1] != 0 && at[1] < sizeof(int64_t)) {  // LONG1
        *top++ = make_word(kInt, static_cast<uint64_t>(read_short_integer(at + 2, at[1])));
        at += 2 + at[1];
      } else {
        break;
      }
      continue;
    }
    if (number >= memo_size) throw Unsupported{kNotMemoized};
    const Word value = memo[number];
    if (value == make_word(kMissing, 0)) throw Unsupported{kNotMemoized};
    *top++ = value;
  }
  stack_.extend_to(top);
  return at;
}

// After the mark behind a list: nine of ten bytes are elements of lists, and most lists appear again and again.
const uint8_t* Machine::run_list(const uint8_t* at, const uint8_t* end) {
  const Word list = stack_[stack_.size() - 1];
  const KnownLists::List* known = known_lists_.find(at, end);
  if (known != nullptr) {
    if (pop_mark() <= fence()) throw Unsupported{kNoList};
    store_.extend_by_content(list, known->content);
    return at + known->num_bytes + 1;
  }
  const uint8_t* const after = push_values(at, end);
  if (after == end || *after != 'e') return after;
  append_items(pop_mark());
  const uint32_t content = store_.shared_content(list);
  if (content != 0) known_lists_.add(at, static_cast<size_t>(after - at), content);
  return after + 1;
}

void Machine::push_reference(size_t number) {
  if (number >= memo_.size() || memo_[number] == make_word(kMissing, 0)) throw Unsupported{kNotMemoized};
  stack_.push(memo_[number]);
}

inline const uint8_t* Machine::run_opcode(uint8_t opcode, const uint8_t* at, const uint8_t* end) {
  const size_t left = static_cast<size_t>(end - at);
  switch (opcode) {
    case 'h':  // BINGET
      if (left < 1) return nullptr;
      push_reference(*at);
      return at + 1;
    case 'j':  // LONG_BINGET
      if (left < 4) return nullptr;
      push_reference(read<uint32_t>(at));
      return at + 4;
    case '(':  // MARK
      marks_.push(stack_.size());
      return !stack_.empty() && tag_of(stack_[stack_.size() - 1]) == kList ? run_list(at, end) : at;
    case '.':  // STOP
      stop();
      return at;
    case 'N':
      stack_.push(make_word(kNone, 0));
      return at;
    case 0x88:  // NEWTRUE
      stack_.push(make_word(kBool, 1));
      return at;
    case 0x89:  // NEWFALSE
      stack_.push(make_word(kBool, 0));
      return at;
    case 'K':  // BININT1
      if (left < 1) return nullptr;
      stack_.push(make_word(kInt, *at));
      return at + 1;
    case 'M':  // BININT2
      if (left < 2) return nullptr;
      stack_.push(make_word(kInt, read<uint16_t>(at)));
      return at + 2;
    case 'J':  // BININT
      if (left < 4) return nullptr;
      stack_.push(make_word(kInt, static_cast<uint64_t>(int64_t{read<int32_t>(at)})));
      return at + 4;
    case 'G':  // BINFLOAT
      if (left < 8) return nullptr;
      store_.floats.push(read_big_endian_double(at));
      stack_.push(make_word(kFloat, store_.floats.size() - 1));
      return at + 8;
    case '}':  // EMPTY_DICT
      stack_.push(store_.new_dict());
      return at;
    case ']':  // EMPTY_LIST
      stack_.push(store_.new_list());
      return at;
    case ')':  // EMPTY_TUPLE
      make_tuple(stack_.size());
      return at;
    case 0x85:  // TUPLE1, TUPLE2, TUPLE3
    case 0x86:
    case 0x87:
      need(opcode - 0x84u);
      make_tuple(stack_.size() - (opcode - 0x84u));
      return at;
    case 't':  // TUPLE
      make_tuple(pop_mark());
      return at;
    case 's':  // SETITEM
      need(3);
      set_items(stack_.size() - 2);
      return at;
    case 'u':  // SETITEMS
      set_items(pop_mark());
      return at;
    case 'a':  // APPEND
      need(2);
      append_items(stack_.size() - 1);
      return at;
    case 'e':  // APPENDS
      append_items(pop_mark());
      return at;
    case 0x94:  // MEMOIZE
      remember(num_memoized_);
      return at;
    case 'q':  // BINPUT
      if (left < 1) return nullptr;
      remember(*at);
      return at + 1;
    case 'r':  // LONG_BINPUT
      if (left < 4) return nullptr;
      remember(read<uint32_t>(at));
      return at + 4;
    case 0x80:  // PROTO
      if (left < 1) return nullptr;
      if (*at > 5) throw Unsupported{"an unknown protocol"};
      return at + 1;
    case 0x95:  // FRAME
      if (left < 8) return nullptr;
      begin_frame(at, at + 8);
      return at + 8;
    default:
      return run_counted(opcode, at, end);
  }
}

const uint8_t* Machine::run_counted(uint8_t opcode, const uint8_t* at, const uint8_t* end) {
  const size_t left = static_cast<size_t>(end - at);
  uint64_t count;
  size_t width;
  switch (opcode) {
    case 0x8a:  // LONG1
    case 0x8c:  // SHORT_BINUNICODE
    case 'C':   // SHORT_BINBYTES
      width = 1;
      break;
    case 'X':  // BINUNICODE
    case 'B':  // BINBYTES
      width = 4;
      break;
    case 0x8d:  // BINUNICODE8
    case 0x8e:  // BINBYTES8
      width = 8;
      break;
    default:
      throw Unsupported{"an opcode that memory snapshots do not use"};
  }
  if (left < width) return nullptr;
  count = width == 1 ? *at : width == 4 ? read<uint32_t>(at) : read<uint64_t>(at);
  if (left - width < count) return nullptr;
  at += width;
  if (opcode == 0x8a) {
    stack_.push(store_.new_integer(at, count));
  } else {
    push_text(opcode == 'C' || opcode == 'B' || opcode == 0x8e ? kBytes : kStr, at, count);
  }
  return at + count;
}

void Machine::push_text(Tag tag, const uint8_t* text, size_t count) {
  if (tag == kStr && !is_utf8(text, count)) throw Unsupported{"a string is not UTF-8"};
  Interner<char>& interner = tag == kStr ? store_.strings : store_.bytes;
  stack_.push(make_word(tag, interner.intern(reinterpret_cast<const char*>(text), count)));
}

void Machine::remember(size_t number) {
  need(1);
  if (number > memo_.size() + kMaxMemoGap) throw Unsupported{"a gap in the memo"};
  const Word value = stack_[stack_.size() - 1];
  if (number == memo_.size()) {
    memo_.push(value);
    ++num_memoized_;
    return;
  }
  memo_.fill(number + 1, make_word(kMissing, 0));
  const bool is_new = memo_[number] == make_word(kMissing, 0);
  if (!is_new && memo_[number] != value) known_lists_.clear();
  num_memoized_ += is_new;
  memo_[number] = value;
}

void Machine::make_tuple(size_t first) {
  const uint32_t content = store_.contents.intern(stack_.data() + first, stack_.size() - first);
  stack_.shrink(first);
  stack_.push(make_word(kTuple, content));
}

void Machine::set_items(size_t first) {
  if (first <= fence()) throw Unsupported{"items without a dict"};
  const size_t count = stack_.size() - first;
  const Word dict = stack_[first - 1];
  if (count % 2 != 0) throw Unsupported{"a key without a value"};
  if (count != 0) {
    if (tag_of(dict) != kDict) throw Unsupported{"items of a value that is not a dict"};
    store_.update(dict, stack_.data() + first, count);
  }
  stack_.shrink(first);
}

void Machine::append_items(size_t first) {
  if (first <= fence()) throw Unsupported{kNoList};
  const size_t count = stack_.size() - first;
  const Word list = stack_[first - 1];
  if (count != 0) {
    if (tag_of(list) != kList) throw Unsupported{"elements of a value that is not a list"};
    store_.extend(list, stack_.data() + first, count);
  }
  stack_.shrink(first);
}

void Machine::begin_frame(const uint8_t* size, const uint8_t* after) {
  const uint64_t start = chunk_start_ + static_cast<uint64_t>(after - chunk_begin_);
  const uint64_t num_bytes = read<uint64_t>(size);
  if (num_bytes > uint64_t{1} << 62) throw Unsupported{"a frame of impossible size"};
  if (start + num_bytes > frames_end_) frames_end_ = start + num_bytes;
}

void Machine::stop() {
  need(1);
  result_ = stack_[stack_.size() - 1];
  is_done_ = true;
  stack_.release();
  marks_.release();
  memo_.release();
  known_lists_.clear();
  pending_.shrink(0);
}

size_t Machine::pop_mark() {
  if (marks_.empty()) throw Unsupported{"a missing mark"};
  const size_t mark = marks_[marks_.size() - 1];
  marks_.shrink(marks_.size() - 1);
  return mark;
}

void Machine::need(size_t count) const {
  if (stack_.size() - fence() < count) throw Unsupported{"too few values on the stack"};
}

}  // namespace memtrace
