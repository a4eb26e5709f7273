// A search among the live Python objects that neither lists them all nor runs code of the program.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace memtrace {

PyObject* live_instances(PyObject*, PyObject* types);

}  // namespace memtrace
