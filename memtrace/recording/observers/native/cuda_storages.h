// Follows CUDA blocks that no allocator reports by the storages of tensors: those of cudaMallocAsync, of pluggable
// allocators, and of torch's own allocator while caching is disabled.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "state.h"

namespace memtrace {

enum class CudaBlock {
  reported,         // the allocator reports its allocation and free
  newly_followed,   // its deleter was replaced now, so that its free is seen
  followed,
  unfollowed        // memory from elsewhere (another library, another process)
};
CudaBlock follow_cuda_block(c10::DataPtr& data);
// Takes note of a block that the current operator returns and that is not one of its arguments: records its allocation
// if the allocator does not report it.
void add_returned_cuda_block(const at::Tensor& tensor);
// To be called before `Recorder::cuda_source` is set to this value.
void prepare_cuda_source(CudaSource source);

}  // namespace memtrace
