// Values of a pickle as 64-bit words, and the containers of the scanner, which hold plain data only.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "memory.h"

namespace memtrace {

// A value: a tag in the low four bits and, above them, the value itself or its index in a table of `Store`.
using Word = uint64_t;

enum Tag : unsigned {
  kNone = 0,
  kBool = 1,
  kInt = 2,    // 60 bits with sign
  kBig = 3,    // an integer of more bits: `Store::bigs`
  kFloat = 4,  // `Store::floats`
  kStr = 5,    // `Store::strings`
  kBytes = 6,  // `Store::bytes`
  kList = 7,   // `Store::lists`
  kTuple = 8,  // `Store::contents`
  kDict = 9,   // `Store::dicts`
  kMissing = 15,
};

constexpr unsigned kTagBits = 4;
constexpr int64_t kMaxInline = (int64_t{1} << 59) - 1;

inline Word make_word(Tag tag, uint64_t payload) { return payload << kTagBits | tag; }
inline Tag tag_of(Word word) { return static_cast<Tag>(word & 15); }
inline uint64_t index_of(Word word) { return word >> kTagBits; }
inline int64_t integer_of(Word word) { return static_cast<int64_t>(word) >> kTagBits; }

// Thrown where a pickle contains what a memory snapshot does not: the Python reader then decides about the file.
struct Unsupported {
  const char* reason;
};

// A growing array of plain data. Large arrays grow without being copied, and what is not yet used takes no memory.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() { free_block(data_, num_bytes_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t index) { return data_[index]; }
  const T& operator[](size_t index) const { return data_[index]; }
  T* end() { return data_ + size_; }

  void push(T value) {
    if (size_ == capacity_) grow(size_ + 1);
    data_[size_++] = value;
  }
  void append(const T* values, size_t count) {
    if (count == 0) return;
    reserve_more(count);
    std::memcpy(data_ + size_, values, count * sizeof(T));
    size_ += count;
  }
  void fill(size_t size, T value) {
    if (size > size_) reserve_more(size - size_);
    while (size_ < size) data_[size_++] = value;
  }
  void shrink(size_t size) { size_ = size; }
  // Takes over elements that were written behind the last one, for which there is room.
  void extend_to(const T* end) { size_ = static_cast<size_t>(end - data_); }
  void drop_front(size_t count) {
    size_ -= count;
    if (size_ != 0) std::memmove(data_, data_ + count, size_ * sizeof(T));
  }
  void release() { Buffer().swap(*this); }
  void reserve_more(size_t count) {
    if (count > capacity_ - size_) grow(size_ + count);
  }

 private:
  void grow(size_t needed) {
    size_t capacity = capacity_ + capacity_ / 2 + 8;
    if (capacity < needed) capacity = needed;
    if (capacity > SIZE_MAX / 2 / sizeof(T)) throw std::bad_alloc();
    const size_t num_bytes = block_bytes(capacity * sizeof(T));
    data_ = static_cast<T*>(grow_block(data_, num_bytes_, num_bytes));
    num_bytes_ = num_bytes;
    capacity_ = num_bytes / sizeof(T);
  }
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(num_bytes_, other.num_bytes_);
  }

  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
  size_t num_bytes_ = 0;  // of the block
};

constexpr uint64_t kOddFactor = 0x9E3779B97F4A7C15u;

// Mixes the bits of a hash.
inline uint64_t mix(uint64_t value, uint64_t factor) {
  const unsigned __int128 product = static_cast<unsigned __int128>(value) * factor;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Numbers distinct sequences (texts, contents of lists) in the order in which they first appear.
template <class T>
class Interner {
 public:
  explicit Interner(uint64_t seed) : seed_(seed) { starts_.push(0); }

  uint32_t intern(const T* items, size_t count) {
    if (2 * (hashes_.size() + 1) > slots_.size()) rehash();
    const uint32_t hash = hash_of(items, count);
    const size_t mask = slots_.size() - 1;
    size_t slot = hash & mask;
    for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
      const uint32_t id = slots_[slot] - 1;
      if (hashes_[id] == hash && size(id) == count && equal(id, items, count)) return id;
    }
    return add(items, count, hash, slot);
  }
  // The number of a sequence that was interned; UINT32_MAX if it was not.
  uint32_t find(const T* items, size_t count) const {
    if (slots_.empty()) return UINT32_MAX;
    const uint32_t hash = hash_of(items, count);
    const size_t mask = slots_.size() - 1;
    for (size_t slot = hash & mask; slots_[slot] != 0; slot = (slot + 1) & mask) {
      const uint32_t id = slots_[slot] - 1;
      if (hashes_[id] == hash && size(id) == count && equal(id, items, count)) return id;
    }
    return UINT32_MAX;
  }
  const T* data(uint32_t id) const { return items_.data() + starts_[id]; }
  size_t size(uint32_t id) const { return starts_[id + 1] - starts_[id]; }

 private:
  bool equal(uint32_t id, const T* items, size_t count) const {
    return count == 0 || std::memcmp(data(id), items, count * sizeof(T)) == 0;
  }
  uint32_t add(const T* items, size_t count, uint32_t hash, size_t slot) {
    const uint32_t id = static_cast<uint32_t>(hashes_.size());
    if (id >= UINT32_MAX - 1) throw Unsupported{"too many distinct values"};
    items_.append(items, count);
    starts_.push(items_.size());
    hashes_.push(hash);
    slots_[slot] = id + 1;
    return id;
  }
  void rehash() {
    Buffer<uint32_t> slots;
    slots.fill(slots_.empty() ? 64 : 2 * slots_.size(), 0);
    const size_t mask = slots.size() - 1;
    for (size_t id = 0; id < hashes_.size(); ++id) {
      size_t slot = hashes_[id] & mask;
      while (slots[slot] != 0) slot = (slot + 1) & mask;
      slots[slot] = static_cast<uint32_t>(id + 1);
    }
    slots_ = std::move(slots);
  }
  uint32_t hash_of(const T* items, size_t count) const {
    const char* bytes = reinterpret_cast<const char*>(items);
    size_t left = count * sizeof(T);
    uint64_t hash = seed_ ^ left;
    uint64_t other = ~seed_;
    for (; left >= 32; left -= 32, bytes += 32) {  // two chains, so that multiplications overlap
      uint64_t parts[4];
      std::memcpy(parts, bytes, 32);
      hash = mix(hash ^ parts[0], seed_ ^ parts[1]);
      other = mix(other ^ parts[2], seed_ ^ parts[3]);
    }
    hash ^= mix(other, kOddFactor);
    for (; left >= 8; left -= 8, bytes += 8) {
      uint64_t part;
      std::memcpy(&part, bytes, 8);
      hash = mix(hash ^ part, kOddFactor);
    }
    if (left != 0) {
      uint64_t part = 0;
      std::memcpy(&part, bytes, left);
      hash = mix(hash ^ part, kOddFactor);
    }
    return static_cast<uint32_t>(hash >> 32);
  }

  uint64_t seed_;
  Buffer<T> items_;
  Buffer<uint64_t> starts_;
  Buffer<uint32_t> hashes_;
  Buffer<uint32_t> slots_;  // number + 1, 0 for a free slot
};

}  // namespace memtrace
