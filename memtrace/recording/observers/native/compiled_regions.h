// Code that torch.compile generated: the kernels that it calls, and the lines of the program that it was generated from.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <vector>

#include "state.h"

namespace memtrace {

// What some lines of generated code were generated from.
struct RegionSite {
  int first_line;                // of the generated code; the site ends before the next one
  int32_t module;                // name id of the module whose call was compiled; kNone: unknown
  Phase phase;                   // of the operators that run here outside all module calls
  int32_t generated_frame;       // name id of the frame of the generated code
  std::vector<int32_t> frames;   // name ids of the frames of the program, innermost first
};

// The site of a line of `code`; nullptr if it is not generated code. Call it with the GIL.
const RegionSite* find_region_site(PyCodeObject* code, int line);

// Gives a call the module and phase of the generated code that makes it; returns whether there is such code on the stack.
bool attribute_to_region(OpCall& call, bool may_wait);

void forget_regions();   // call it with the GIL

// memtrace.recording.observers.Observer documents them.
PyObject* watch_region(PyObject*, PyObject* arguments);
PyObject* observed_kernel(PyObject*, PyObject* arguments);

}  // namespace memtrace
