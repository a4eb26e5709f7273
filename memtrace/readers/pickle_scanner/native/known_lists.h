// The bytes of lists that were scanned: a list with the same bytes has the same elements and needs no second scan.
#pragma once

#include "values.h"

namespace memtrace {

// Valid while no number of the memo gets another value; `clear` it then.
class KnownLists {
 public:
  explicit KnownLists(uint64_t seed) : seed_(seed) {}

  struct List {
    uint64_t start;  // in `bytes_`
    uint32_t num_bytes;
    uint32_t content;   // its number in `Store::contents`
    uint32_t next;      // number + 1 of another list with the same beginning, 0 for none
    uint32_t follower;  // number + 1 of the list that came after it the last time, 0 for none
  };

  // Returns the list whose elements begin at `at` and are followed by APPENDS; nullptr if there is none.
  const List* find(const uint8_t* at, const uint8_t* end) {
    if (lists_.empty() || static_cast<size_t>(end - at) < kPrefixBytes) return nullptr;
    // Programs repeat themselves: mostly the same list follows.
    uint32_t number = lists_[last_].follower;
    if (number == 0 || !begins_with(at, end, lists_[number - 1])) {
      number = slots_[slot_of(at)];
      for (unsigned tries = 0; number != 0 && !begins_with(at, end, lists_[number - 1]); ++tries) {
        number = tries < kMaxTries ? lists_[number - 1].next : 0;
      }
    }
    if (number == 0) return nullptr;
    follow(number);
    return &lists_[number - 1];
  }

  void add(const uint8_t* at, size_t count, uint32_t content) {
    if (count < kPrefixBytes || bytes_.size() + count > kMaxBytes) return;
    if (slots_.empty()) slots_.fill(kNumSlots, 0);
    uint32_t& first = slots_[slot_of(at)];
    lists_.push(List{bytes_.size(), static_cast<uint32_t>(count), content, first, 0});
    bytes_.append(at, count);
    first = static_cast<uint32_t>(lists_.size());
    follow(first);
  }

  void clear() {
    slots_.release();
    lists_.release();
    bytes_.release();
    last_ = 0;
  }

 private:
  static constexpr size_t kPrefixBytes = 24;  // the innermost frames of a call stack
  static constexpr size_t kNumSlots = 1 << 12;
  static constexpr size_t kMaxBytes = 4 << 20;
  static constexpr unsigned kMaxTries = 32;

  bool begins_with(const uint8_t* at, const uint8_t* end, const List& list) const {
    return list.num_bytes < static_cast<size_t>(end - at) && at[list.num_bytes] == 'e' &&
           std::memcmp(at, bytes_.data() + list.start, list.num_bytes) == 0;
  }
  void follow(uint32_t number) {
    lists_[last_].follower = number;
    last_ = number - 1;
  }
  size_t slot_of(const uint8_t* at) const {
    uint64_t parts[kPrefixBytes / 8];
    std::memcpy(parts, at, kPrefixBytes);
    uint64_t hash = seed_;
    for (const uint64_t part : parts) hash = mix(hash ^ part, kOddFactor);
    return static_cast<size_t>(hash) & (kNumSlots - 1);
  }

  uint64_t seed_;
  Buffer<uint32_t> slots_;  // number + 1 of the first list with a beginning, 0 for none
  Buffer<List> lists_;
  Buffer<uint8_t> bytes_;
  uint32_t last_ = 0;  // number of the list that was found or added last
};

}  // namespace memtrace
