#pragma once

#include <ATen/core/Tensor.h>

#include "state.h"

namespace memtrace {

// Sets address, size, device and foreign of the tensor's block; returns false if the tensor has no memory.
bool describe_storage(const at::Tensor& tensor, Event& event);

}  // namespace memtrace
