// Memory of growing arrays: small ones come from malloc, large ones are mappings made of huge pages where the system
// has them. The first access to a small page takes longer than filling it, and a snapshot takes thousands of them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace memtrace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kMinMappedBytes = kHugePageBytes / 2;

// The bytes that a block of at least `num_bytes` has.
inline size_t block_bytes(size_t num_bytes) {
  return num_bytes < kMinMappedBytes ? num_bytes : (num_bytes + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
}

inline void free_block(void* block, size_t num_bytes) {
  if (num_bytes < kMinMappedBytes) {
    std::free(block);
  } else {
    munmap(block, num_bytes);
  }
}

// Reserves addresses that begin at a multiple of the size of a huge page; nullptr if there are none left.
inline char* reserve_addresses(size_t num_bytes) {
  void* all = mmap(nullptr, num_bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(all);
  const size_t before = (kHugePageBytes - (reinterpret_cast<uintptr_t>(begin) & (kHugePageBytes - 1))) % kHugePageBytes;
  if (before != 0) munmap(begin, before);
  if (before != kHugePageBytes) munmap(begin + before + num_bytes, kHugePageBytes - before);
  return begin + before;
}

// Returns a larger block with the content of `block`, which is no longer valid; sizes are those of `block_bytes`.
// Whole pages of large blocks move without being copied.
inline void* grow_block(void* block, size_t old_bytes, size_t num_bytes) {
  if (num_bytes < kMinMappedBytes) {
    void* const larger = std::realloc(block, num_bytes);
    if (larger == nullptr) throw std::bad_alloc();
    return larger;
  }
  char* const place = reserve_addresses(num_bytes);
  if (place == nullptr) throw std::bad_alloc();
  const bool was_mapped = old_bytes >= kMinMappedBytes;
  void* const larger = was_mapped ? mremap(block, old_bytes, num_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place)
                                  : mmap(place, num_bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (larger == MAP_FAILED) {
    munmap(place, num_bytes);
    throw std::bad_alloc();
  }
  madvise(larger, num_bytes, MADV_HUGEPAGE);  // only advice: it may fail
  if (!was_mapped && block != nullptr) {
    std::memcpy(larger, block, old_bytes);
    std::free(block);
  }
  return larger;
}

}  // namespace memtrace
