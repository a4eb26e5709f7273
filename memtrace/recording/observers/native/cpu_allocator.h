#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace memtrace {

// Replaces the deleter of a block that torch's CPU allocator allocated before the recording, so that its free is seen.
// Returns false if the memory does not belong to that allocator (NumPy, shared memory, a copy-on-write wrapper).
bool trace_deleter(c10::DataPtr& data);
bool has_traced_deleter(const c10::DataPtr& data);
void record_allocation(uint64_t address, int64_t size, int8_t device, int32_t stream);

}  // namespace memtrace
