#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <optional>

#include "foreign_memory.h"
#include "state.h"

namespace memtrace {

constexpr c10::DispatchKey kMode = c10::DispatchKey::DeferredInit;   // torch reserves it for modes out of its tree

struct Memory {
  uint64_t address;
  int64_t size;
  int8_t device;   // as in Event
  Origin origin;
};

// The memory of a tensor; nullopt if it has none. Runs no code of tensor subclasses.
std::optional<Memory> memory_of(const at::Tensor& tensor);

// The call in which something happens outside all operators: a call without a name, with the stack of the thread.
OpCall unnamed_call(ThreadState& thread);
void exit_range(ThreadState& thread);   // ends the innermost profiler range of a thread

}  // namespace memtrace
