#include "store.h"

namespace memtrace {

namespace {

constexpr size_t kLinearKeys = 8;
constexpr uint32_t kNoShape = UINT32_MAX;  // of keys that repeat, or of more shapes than are kept

uint32_t key_of(Word word) {
  if (tag_of(word) != kStr) throw Unsupported{"a dict has a key that is not a string"};
  return static_cast<uint32_t>(index_of(word));
}

bool has_repeated_key(const uint32_t* keys, size_t count) {
  for (size_t i = 1; i < count; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (keys[i] == keys[j]) return true;
    }
  }
  return false;
}

}  // namespace

size_t LooseDict::slot_of(uint32_t key) const {
  const size_t mask = slots.size() - 1;
  size_t slot = (key * 0x9E3779B1u) >> 7 & mask;
  while (slots[slot] != 0 && keys[slots[slot] - 1] != key) slot = (slot + 1) & mask;
  return slot;
}

void LooseDict::rehash() {
  slots.assign(slots.empty() ? 64 : 2 * slots.size(), 0);
  for (size_t position = 0; position < keys.size(); ++position) {
    slots[slot_of(keys[position])] = static_cast<uint32_t>(position + 1);
  }
}

Word LooseDict::get(uint32_t key) const {
  if (!slots.empty()) {
    const uint32_t position = slots[slot_of(key)];
    return position != 0 ? values[position - 1] : make_word(kMissing, 0);
  }
  for (size_t position = 0; position < keys.size(); ++position) {
    if (keys[position] == key) return values[position];
  }
  return make_word(kMissing, 0);
}

void LooseDict::set(uint32_t key, Word value) {
  // A key that is there already keeps its place, as in Python.
  if (slots.empty()) {
    for (size_t position = 0; position < keys.size(); ++position) {
      if (keys[position] == key) {
        values[position] = value;
        return;
      }
    }
  } else if (const uint32_t position = slots[slot_of(key)]; position != 0) {
    values[position - 1] = value;
    return;
  }
  keys.push_back(key);
  values.push_back(value);
  if (keys.size() >= UINT32_MAX) throw Unsupported{"a dict has too many keys"};
  if (slots.empty() ? keys.size() > kLinearKeys : 2 * keys.size() > slots.size()) {
    rehash();
  } else if (!slots.empty()) {
    slots[slot_of(key)] = static_cast<uint32_t>(keys.size());
  }
}

Store::Store(uint64_t seed)
    : strings(seed), bytes(seed), bigs(seed), contents(seed), shape_keys_(seed) {
  contents.intern(nullptr, 0);  // number 0 is the empty list
  shapes_.emplace_back();       // shape 0 is the empty dict
}

Word Store::new_integer(const uint8_t* data, size_t count) {
  while (count > 1) {
    const uint8_t top = data[count - 1], below = data[count - 2];
    if (!((top == 0 && below < 128) || (top == 255 && below >= 128))) break;
    --count;
  }
  if (count <= 8) {
    uint64_t value = count != 0 && data[count - 1] >= 128 ? ~uint64_t{0} : 0;
    if (count != 0) std::memcpy(&value, data, count);
    const int64_t integer = static_cast<int64_t>(value);
    if (integer >= -kMaxInline - 1 && integer <= kMaxInline) return make_word(kInt, value);
  }
  return make_word(kBig, bigs.intern(reinterpret_cast<const char*>(data), count));
}

bool Store::get_int64(Word word, int64_t& value) const {
  switch (tag_of(word)) {
    case kInt:
      value = integer_of(word);
      return true;
    case kBool:
      value = static_cast<int64_t>(index_of(word));
      return true;
    case kBig: {
      const uint32_t id = static_cast<uint32_t>(index_of(word));
      if (bigs.size(id) > 8) return false;
      const char* data = bigs.data(id);
      value = data[bigs.size(id) - 1] < 0 ? -1 : 0;
      std::memcpy(&value, data, bigs.size(id));
      return true;
    }
    default:
      return false;
  }
}

Word Store::new_list() {
  lists_.push(0);
  return make_word(kList, lists_.size() - 1);
}

Word Store::new_dict() {
  if (dicts_.size() >= UINT32_MAX) throw Unsupported{"too many dicts"};
  dicts_.push(0);
  return make_word(kDict, dicts_.size() - 1);
}

void Store::extend(Word list, const Word* values, size_t count) {
  uint64_t& state = lists_[index_of(list)];
  if (count == 0) return;
  if (state == 0 && count <= kMaxShared) {
    state = contents.intern(values, count);
    return;
  }
  if ((state & kGrown) == 0) {
    Buffer<Word> own;
    const uint32_t content = static_cast<uint32_t>(state);
    own.append(contents.data(content), contents.size(content));
    grown_.push_back(std::move(own));
    state = kGrown | (grown_.size() - 1);
  }
  grown_[state & ~kGrown].append(values, count);
}

void Store::extend_by_content(Word list, uint32_t content) {
  uint64_t& state = lists_[index_of(list)];
  if (state == 0) {
    state = content;
  } else {
    extend(list, contents.data(content), contents.size(content));
  }
}

const Word* Store::items(Word sequence, size_t& count) const {
  uint32_t content = static_cast<uint32_t>(index_of(sequence));
  if (tag_of(sequence) == kList) {
    const uint64_t state = lists_[index_of(sequence)];
    if ((state & kGrown) != 0) {
      count = grown_[state & ~kGrown].size();
      return grown_[state & ~kGrown].data();
    }
    content = static_cast<uint32_t>(state);
  }
  count = contents.size(content);
  return contents.data(content);
}

Word Store::canonical(Word word) {
  if (tag_of(word) != kList) return word;
  uint64_t& state = lists_[index_of(word)];
  if ((state & kGrown) != 0) {
    const Buffer<Word>& own = grown_[state & ~kGrown];
    if (own.size() > kMaxCanonical) return word;
    state = contents.intern(own.data(), own.size());
  }
  // Beyond all numbers of lists, so that it differs from the words of the lists that are too long.
  return make_word(kList, state | uint64_t{1} << 40);
}

void Store::update(Word dict, const Word* items, size_t count) {
  const uint32_t number = static_cast<uint32_t>(index_of(dict));
  if (count == 0 || (dicts_[number] == 0 && add_row(number, items, count / 2))) return;
  LooseDict& loose = loosen(number);
  for (size_t item = 0; item + 1 < count; item += 2) loose.set(key_of(items[item]), items[item + 1]);
}

bool Store::add_row(uint32_t dict, const Word* items, size_t num_keys) {
  if (num_keys > kMaxKeys) return false;
  const uint32_t number = has_last_shape(items, num_keys) ? last_shape_ : find_shape(items, num_keys);
  if (number == kNoShape) return false;
  Shape& shape = shapes_[number];
  if (shape.num_rows == UINT32_MAX) throw Unsupported{"too many dicts"};
  Column* const columns = shape.columns.data();
  for (size_t key = 0; key < num_keys; ++key) columns[key].push(items[2 * key + 1]);
  dicts_[dict] = uint64_t{number} << 32 | shape.num_rows++;
  return true;
}

bool Store::has_last_shape(const Word* items, size_t num_keys) const {
  const std::vector<Word>& last = shapes_[last_shape_].key_words;
  if (last.size() != num_keys) return false;
  for (size_t key = 0; key < num_keys; ++key) {
    if (items[2 * key] != last[key]) return false;
  }
  return true;
}

uint32_t Store::find_shape(const Word* items, size_t num_keys) {
  uint32_t keys[kMaxKeys] = {};
  for (size_t key = 0; key < num_keys; ++key) keys[key] = key_of(items[2 * key]);
  const uint32_t known = shape_keys_.find(keys, num_keys);
  if (known != UINT32_MAX) {
    if (shape_numbers_[known] != kNoShape) last_shape_ = shape_numbers_[known];
    return shape_numbers_[known];
  }
  if (shapes_.size() >= kMaxShapes) return kNoShape;
  shape_keys_.intern(keys, num_keys);
  if (has_repeated_key(keys, num_keys)) {
    shape_numbers_.push(kNoShape);
    return kNoShape;
  }
  last_shape_ = static_cast<uint32_t>(shapes_.size());
  shape_numbers_.push(last_shape_);
  shapes_.emplace_back();
  shapes_.back().keys.assign(keys, keys + num_keys);
  for (size_t key = 0; key < num_keys; ++key) shapes_.back().key_words.push_back(items[2 * key]);
  shapes_.back().columns.resize(num_keys);
  return last_shape_;
}

LooseDict& Store::loosen(uint32_t dict) {
  if (shape_of(dict) == kLoose) return loose_[row_of(dict)];
  if (loose_.size() >= UINT32_MAX) throw Unsupported{"too many dicts"};
  loose_.emplace_back();
  const Shape& shape = shapes_[shape_of(dict)];
  for (size_t key = 0; key < shape.keys.size(); ++key) {
    loose_.back().set(shape.keys[key], shape.columns[key].get(row_of(dict)));
  }
  dicts_[dict] = uint64_t{kLoose} << 32 | (loose_.size() - 1);
  return loose_.back();
}

Word Store::get(uint32_t dict, uint32_t key) const {
  if (shape_of(dict) == kLoose) return loose_[row_of(dict)].get(key);
  const Shape& shape = shapes_[shape_of(dict)];
  for (size_t position = 0; position < shape.keys.size(); ++position) {
    if (shape.keys[position] == key) return shape.columns[position].get(row_of(dict));
  }
  return make_word(kMissing, 0);
}

size_t Store::num_items(uint32_t dict) const {
  return shape_of(dict) == kLoose ? loose_[row_of(dict)].keys.size() : shapes_[shape_of(dict)].keys.size();
}

void Store::item(uint32_t dict, size_t position, uint32_t& key, Word& value) const {
  if (shape_of(dict) == kLoose) {
    key = loose_[row_of(dict)].keys[position];
    value = loose_[row_of(dict)].values[position];
    return;
  }
  const Shape& shape = shapes_[shape_of(dict)];
  key = shape.keys[position];
  value = shape.columns[position].get(row_of(dict));
}

}  // namespace memtrace
