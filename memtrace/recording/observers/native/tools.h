// Calls that an interrupt cannot leave half done.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace memtrace {

PyObject* call_until_done(PyObject*, PyObject* arguments);
PyObject* call_or_undo(PyObject*, PyObject* arguments);

}  // namespace memtrace
