#pragma once

#include <cstdint>

#include "state.h"

namespace memtrace {

struct CudaEvent {
  EventKind kind;
  int device;
  uint64_t address;         // of an oom: what the device had free
  int64_t size, stream, pool;
  int64_t extra = kNone;    // of a baseline its allocated size, of an older segment whether it is expandable
  int64_t time_ns = kNone;  // kNone: now
};

void record_cuda_event(const CudaEvent& event);

}  // namespace memtrace
