// The functions of the Python module that mark what the program does: names, module calls, backward, spans and labels.
// memtrace.recording.observers.Observer documents them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace memtrace {

PyObject* fail(const char* message);   // module.cpp; sets a RuntimeError and returns nullptr
void hide_code(PyObject* code);        // stacks.cpp

PyObject* hide_frames_of(PyObject*, PyObject* code);
PyObject* name_id(PyObject*, PyObject* const* arguments, Py_ssize_t count);
PyObject* module_hook(PyObject*, PyObject* arguments);
PyObject* pop_module(PyObject*, PyObject* name);
PyObject* begin_backward(PyObject*, PyObject*);
PyObject* end_backward(PyObject*, PyObject* started_ns);
PyObject* span(PyObject*, PyObject* arguments);
PyObject* end_phase(PyObject*, PyObject*);
PyObject* waiting(PyObject*, PyObject* on);
PyObject* label(PyObject*, PyObject* arguments);
PyObject* label_inputs(PyObject*, PyObject* arguments);
PyObject* baseline(PyObject*, PyObject* tensors);
PyObject* collected(PyObject*, PyObject* const* arguments, Py_ssize_t count);   // an element of gc.callbacks
void record_collections();   // the spans of the garbage collections so far; call it with the GIL

}  // namespace memtrace
