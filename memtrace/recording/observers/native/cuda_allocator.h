#pragma once

#include <cstdint>
#include <vector>

#include "state.h"

namespace memtrace {

struct CudaEvent {
  EventKind kind;
  int device;
  uint64_t address;         // oom: free bytes of the device
  int64_t size, stream, pool;
  int64_t extra = kNone;    // baseline, found: allocated size, older_segment: 1 if expandable
  int64_t time_ns = kNone;  // kNone: now
};

void record_cuda_event(const CudaEvent& event);

// Attaches to the allocator; false if it reports no events. Its events are recorded from its next snapshot on, and
// `finish_cuda_attachment` must follow.
bool attach_cuda_allocator();
// Records the blocks and segments that the snapshot contains, before all that happened after it.
void finish_cuda_attachment(const std::vector<CudaEvent>& existing, CudaSource source);

}  // namespace memtrace
