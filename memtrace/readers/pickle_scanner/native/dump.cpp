#include "dump.h"

namespace memtrace {

namespace {

constexpr int kMaxDepth = 200;

}  // namespace

void PickleWriter::write_list(const Word* words, size_t count) {
  out_.shrink(0);
  put<uint8_t>(0x80, 4);
  out_.push(']');
  out_.push('(');
  for (size_t word = 0; word < count; ++word) write(words[word], 0);
  out_.push('e');
  out_.push('.');
}

void PickleWriter::write(Word word, int depth) {
  switch (tag_of(word)) {
    case kMissing:
    case kNone:
      out_.push('N');
      return;
    case kBool:
      out_.push(index_of(word) != 0 ? 0x88 : 0x89);
      return;
    case kInt: {
      const int64_t value = integer_of(word);
      write_integer(&value, sizeof(value));
      return;
    }
    case kBig: {
      const uint32_t id = static_cast<uint32_t>(index_of(word));
      write_integer(store_.bigs.data(id), store_.bigs.size(id));
      return;
    }
    case kFloat: {
      uint64_t bits;
      std::memcpy(&bits, &store_.floats[index_of(word)], sizeof(bits));
      put<uint64_t>('G', __builtin_bswap64(bits));
      return;
    }
    default:
      if (!write_reference(word)) write_container(word, depth);
  }
}

void PickleWriter::write_integer(const void* bytes, size_t count) {
  put<uint8_t>(0x8a, static_cast<uint8_t>(count));
  out_.append(static_cast<const uint8_t*>(bytes), count);
}

void PickleWriter::write_text(Tag tag, uint32_t id) {
  const Interner<char>& interner = tag == kStr ? store_.strings : store_.bytes;
  put<uint64_t>(tag == kStr ? 0x8d : 0x8e, interner.size(id));
  out_.append(reinterpret_cast<const uint8_t*>(interner.data(id)), interner.size(id));
}

void PickleWriter::write_container(Word word, int depth) {
  // Values that contain themselves end here too: a tuple is memoized after its elements.
  if (depth > kMaxDepth) throw Unsupported{"values are nested too deeply"};
  size_t count;
  switch (tag_of(word)) {
    case kStr:
    case kBytes:
      write_text(tag_of(word), static_cast<uint32_t>(index_of(word)));
      remember(word);
      return;
    case kDict: {
      const uint32_t dict = static_cast<uint32_t>(index_of(word));
      out_.push('}');
      remember(word);
      out_.push('(');
      count = store_.num_items(dict);
      for (size_t position = 0; position < count; ++position) {
        uint32_t key;
        Word value;
        store_.item(dict, position, key, value);
        write(make_word(kStr, key), depth + 1);
        write(value, depth + 1);
      }
      out_.push('u');
      return;
    }
    case kList:
      out_.push(']');
      remember(word);
      [[fallthrough]];
    default: {
      out_.push('(');
      const Word* items = store_.items(word, count);
      for (size_t item = 0; item < count; ++item) write(items[item], depth + 1);
      out_.push(tag_of(word) == kList ? 'e' : 't');
      if (tag_of(word) != kList) remember(word);
    }
  }
}

bool PickleWriter::write_reference(Word word) {
  const auto known = memo_.find(word);
  if (known == memo_.end()) return false;
  put<uint32_t>('j', known->second);
  return true;
}

void PickleWriter::remember(Word word) {
  if (memo_.size() >= UINT32_MAX) throw Unsupported{"too many values"};
  const uint32_t number = static_cast<uint32_t>(memo_.size());
  memo_.emplace(word, number);
  put<uint32_t>('r', number);
}

}  // namespace memtrace
