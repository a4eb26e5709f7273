// Memory that does not come from a traced allocator: NumPy arrays, shared memory, mapped files, other CUDA libraries.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace memtrace {

enum class Origin : int8_t {
  traced,        // of torch's allocators, which report the free
  unreported,    // the same, seen for the first time: the storage was made without the traced allocator (deepcopy)
  foreign,       // from outside, seen before
  foreign_new,   // from outside, seen for the first time
  excluded,      // from outside, and not to be recorded
};

// Whether the first sight of memory is its allocation, as far as it is known.
inline bool begins_at_first_sight(Origin origin) { return origin == Origin::unreported || origin == Origin::foreign_new; }

// Where the memory of a storage comes from. Its free will be recorded, whatever its origin.
Origin watch_memory(c10::StorageImpl* storage, c10::DataPtr& data);

// Sets the memory that is not recorded: ascending ranges [begin, end).
void exclude_memory(std::vector<std::pair<uint64_t, uint64_t>> ranges);

// Records the free of the foreign memory that has been freed, for at most `max_checks` of the storages whose deleter
// cannot be replaced. Consecutive calls take turns, so that all storages are checked.
void record_foreign_frees(size_t max_checks);

// Forgets the storages of a recording that has ended.
void forget_foreign_memory();

}  // namespace memtrace
