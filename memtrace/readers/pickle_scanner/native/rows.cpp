#include "rows.h"

namespace memtrace {

namespace {

// Looks up a key in dicts; the column of a shape is found once for many dicts in a row.
class KeyReader {
 public:
  KeyReader(const Store& store, uint32_t key) : store_(store), key_(key) {}

  Word get(uint32_t dict) {
    const uint32_t shape = store_.shape_of(dict);
    if (shape == Store::kLoose) return store_.get(dict, key_);
    if (shape != shape_) {
      shape_ = shape;
      column_ = nullptr;
      const Shape& known = store_.shape(shape);
      for (size_t position = 0; position < known.keys.size(); ++position) {
        if (known.keys[position] == key_) column_ = &known.columns[position];
      }
    }
    return column_ != nullptr ? column_->get(store_.row_of(dict)) : make_word(kMissing, 0);
  }

 private:
  const Store& store_;
  uint32_t key_;
  uint32_t shape_ = Store::kLoose;
  const Column* column_ = nullptr;
};

// Numbers words in the order in which they first appear.
class Codes {
 public:
  Codes() { slots_.fill(64, Slot{0, -1}); }

  // The number of a word; `is_new` if it was not seen before.
  int32_t number(Word word, bool& is_new) {
    Slot* slot = find(word);
    is_new = slot->code < 0;
    if (!is_new) return slot->code;
    if (count_ == INT32_MAX) throw Unsupported{"too many distinct values"};
    if (2 * (static_cast<size_t>(count_) + 1) > slots_.size()) {
      grow();
      slot = find(word);
    }
    *slot = Slot{word, count_};
    return count_++;
  }

 private:
  struct Slot {
    Word word;
    int32_t code;
  };

  Slot* find(Word word) {
    const size_t mask = slots_.size() - 1;
    size_t slot = (word * 0x9E3779B97F4A7C15u) >> 20 & mask;
    while (slots_[slot].code >= 0 && slots_[slot].word != word) slot = (slot + 1) & mask;
    return &slots_[slot];
  }
  void grow() {
    Buffer<Slot> old = std::move(slots_);
    slots_ = Buffer<Slot>();
    slots_.fill(2 * old.size(), Slot{0, -1});
    for (size_t slot = 0; slot < old.size(); ++slot) {
      if (old[slot].code >= 0) *find(old[slot].word) = old[slot];
    }
  }

  Buffer<Slot> slots_;
  int32_t count_ = 0;
};

}  // namespace

bool read_dicts(const Store& store, Word sequence, uint32_t* dicts) {
  size_t count;
  const Word* items = store.items(sequence, count);
  for (size_t item = 0; item < count; ++item) {
    if (tag_of(items[item]) != kDict) return false;
    dicts[item] = static_cast<uint32_t>(index_of(items[item]));
  }
  return true;
}

bool read_int64(const Store& store, const uint32_t* dicts, size_t count, uint32_t key, int64_t* values) {
  KeyReader reader(store, key);
  for (size_t row = 0; row < count; ++row) {
    if (!store.get_int64(reader.get(dicts[row]), values[row])) return false;
  }
  return true;
}

void read_codes(Store& store, const uint32_t* dicts, size_t count, uint32_t key, int32_t* codes,
                std::vector<Word>& distinct) {
  KeyReader reader(store, key);
  Codes numbers;
  Word last_word = 0;
  int32_t last_code = -1;
  for (size_t row = 0; row < count; ++row) {
    const Word word = reader.get(dicts[row]);
    if (word != last_word || last_code < 0) {
      bool is_new;
      last_word = word;
      last_code = numbers.number(store.canonical(word), is_new);
      if (is_new) distinct.push_back(word);
    }
    codes[row] = last_code;
  }
}

void read_words(const Store& store, const uint32_t* dicts, size_t count, uint32_t key, Word* words) {
  KeyReader reader(store, key);
  for (size_t row = 0; row < count; ++row) words[row] = reader.get(dicts[row]);
}

}  // namespace memtrace
