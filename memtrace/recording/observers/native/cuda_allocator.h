#pragma once

#include <cstdint>

#include "state.h"

namespace memtrace {

struct CudaEvent {
  EventKind kind;
  int device;
  uint64_t address;
  int64_t size, stream;
};

void record_cuda_event(const CudaEvent& event);

}  // namespace memtrace
