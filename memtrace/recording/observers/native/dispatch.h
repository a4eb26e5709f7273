#pragma once

#include <ATen/core/Tensor.h>

#include "state.h"

namespace memtrace {

// Fills in address, size, device and foreign of the block behind a tensor; false when it has none.
bool describe_storage(const at::Tensor& tensor, Event& event);

}  // namespace memtrace
