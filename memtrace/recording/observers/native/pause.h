// Pauses a recording, and resumes it: between two windows nothing is observed but the end of what is known.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace memtrace {

PyObject* pause(PyObject*, PyObject*);
PyObject* resume(PyObject*, PyObject*);

// Records the free of a CUDA block during a pause, if the block is known.
void record_known_cuda_free(uint64_t address, int8_t device);

}  // namespace memtrace
