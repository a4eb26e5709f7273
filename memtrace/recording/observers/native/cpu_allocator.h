#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace memtrace {

// Have the free of a block that torch's CPU allocator gave out before the recording seen too.
// False: the memory is not the allocator's own (NumPy's, shared memory, a copy-on-write wrapper).
bool adopt_deleter(c10::DataPtr& data);
bool has_traced_deleter(const c10::DataPtr& data);
void record_allocation(uint64_t address, int64_t size, int8_t device, int32_t stream);

}  // namespace memtrace
