#pragma once

#include <cstdint>

#include "state.h"

namespace memtrace {

struct CudaEvent {
  EventKind kind;
  int device;
  uint64_t address;         // oom: free bytes of the device
  int64_t size, stream, pool;
  int64_t extra = kNone;    // baseline: allocated size, older_segment: 1 if expandable
  int64_t time_ns = kNone;  // kNone: now
};

void record_cuda_event(const CudaEvent& event);

}  // namespace memtrace
