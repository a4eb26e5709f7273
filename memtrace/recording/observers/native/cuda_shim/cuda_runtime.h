// Stands before CUDA headers that are incomplete, such as those of the wheels that torch depends on: the observer needs
// the runtime's host functions, not what a CUDA compiler adds in the header of this name.
#pragma once
#include <cuda_runtime_api.h>
