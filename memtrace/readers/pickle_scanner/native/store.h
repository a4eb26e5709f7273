// The values of one pickle. Dicts with the same keys are rows of one table, lists with the same content share it.
#pragma once

#include <vector>

#include "values.h"

namespace memtrace {

// Values under one key of all dicts with the same keys: four bytes each while all of them fit.
class Column {
 public:
  void push(Word word) {
    if (!is_wide_ && word <= UINT32_MAX) {
      narrow_.push(static_cast<uint32_t>(word));
      return;
    }
    if (!is_wide_) widen();
    wide_.push(word);
  }
  Word get(size_t row) const { return is_wide_ ? wide_[row] : narrow_[row]; }

 private:
  void widen() {
    wide_.reserve_more(narrow_.size() + 1);
    for (size_t row = 0; row < narrow_.size(); ++row) wide_.push(narrow_[row]);
    narrow_.release();
    is_wide_ = true;
  }

  Buffer<uint32_t> narrow_;
  Buffer<Word> wide_;
  bool is_wide_ = false;
};

// The dicts with the same keys in the same order.
struct Shape {
  std::vector<uint32_t> keys;  // numbers in `Store::strings`
  std::vector<Word> key_words;
  std::vector<Column> columns;
  uint32_t num_rows = 0;
};

// A dict that was changed after its first items, or that has too many keys for a shape.
struct LooseDict {
  std::vector<uint32_t> keys;
  std::vector<Word> values;
  std::vector<uint32_t> slots;  // a hash table of positions + 1; empty while there are few keys

  Word get(uint32_t key) const;
  void set(uint32_t key, Word value);

 private:
  size_t slot_of(uint32_t key) const;
  void rehash();
};

class Store {
 public:
  explicit Store(uint64_t seed);

  Interner<char> strings;
  Interner<char> bytes;
  Interner<char> bigs;  // little-endian two's complement, as short as possible
  Interner<Word> contents;
  Buffer<double> floats;

  Word new_integer(const uint8_t* bytes, size_t count);
  Word new_list();
  Word new_dict();

  // Appends to a list. Lists of up to `kMaxShared` values that are filled at once share equal contents.
  void extend(Word list, const Word* values, size_t count);
  void extend_by_content(Word list, uint32_t content);
  // The number in `contents` of what is in a list; 0 if the list is empty or does not share its content.
  uint32_t shared_content(Word list) const {
    const uint64_t state = lists_[index_of(list)];
    return (state & kGrown) == 0 ? static_cast<uint32_t>(state) : 0;
  }
  // Sets items of a dict: keys and values in turn.
  void update(Word dict, const Word* items, size_t count);

  const Word* items(Word sequence, size_t& count) const;
  // A number that lists of equal values share. Scanning must be over.
  Word canonical(Word word);
  bool get_int64(Word word, int64_t& value) const;
  Word get(uint32_t dict, uint32_t key) const;
  size_t num_items(uint32_t dict) const;
  void item(uint32_t dict, size_t position, uint32_t& key, Word& value) const;

  static constexpr size_t kMaxShared = 999;  // Python's pickler writes longer lists in batches of 1000
  static constexpr size_t kMaxCanonical = 8192;

  uint32_t shape_of(uint32_t dict) const { return static_cast<uint32_t>(dicts_[dict] >> 32); }
  uint32_t row_of(uint32_t dict) const { return static_cast<uint32_t>(dicts_[dict]); }
  size_t num_shapes() const { return shapes_.size(); }
  const Shape& shape(uint32_t number) const { return shapes_[number]; }
  static constexpr uint32_t kLoose = UINT32_MAX;

 private:
  // Adds the items of a new dict to its shape; false if they have none.
  bool add_row(uint32_t dict, const Word* items, size_t num_keys);
  uint32_t find_shape(const Word* items, size_t num_keys);
  bool has_last_shape(const Word* items, size_t num_keys) const;
  LooseDict& loosen(uint32_t dict);

  static constexpr size_t kMaxKeys = 64;
  static constexpr size_t kMaxShapes = 4096;
  static constexpr uint64_t kGrown = uint64_t{1} << 63;

  Buffer<uint64_t> lists_;  // a number in `contents`, or kGrown and a number in `grown_`
  std::vector<Buffer<Word>> grown_;
  Buffer<uint64_t> dicts_;  // shape and row, or kLoose and a number in `loose_`
  std::vector<Shape> shapes_;
  std::vector<LooseDict> loose_;
  Interner<uint32_t> shape_keys_;     // the number of a sequence of keys ...
  Buffer<uint32_t> shape_numbers_;    // ... and its shape
  uint32_t last_shape_ = 0;
};

}  // namespace memtrace
