#include "tools.h"   // first: it includes Python.h

namespace memtrace {
namespace {

// Interrupts of one call after which it is left alone: somebody who presses Ctrl-C that often wants the program to go on.
constexpr int kMaxInterrupts = 10;

// The exception that is being raised, taken off the thread.
class Raised {
 public:
  Raised() { PyErr_Fetch(&type_, &value_, &traceback_); }
  void restore() { PyErr_Restore(type_, value_, traceback_); }
  void discard() {
    Py_XDECREF(type_);
    Py_XDECREF(value_);
    Py_XDECREF(traceback_);
  }

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

// Calls an idempotent function until it returns. Takes the reference to nothing; leaves no exception.
void call_while_interrupted(PyObject* function, PyObject* arguments) {
  for (int tries = 0; tries < kMaxInterrupts; ++tries) {
    PyObject* result = PyObject_CallObject(function, arguments);
    if (result != nullptr) {
      Py_DECREF(result);
      return;
    }
    Raised().discard();
  }
}

}  // namespace

// call_until_done(function, *arguments): calls an idempotent function until it returns, and raises the first exception
// after that. A signal handler may raise at the first instruction of a Python function, which cannot catch that itself.
PyObject* call_until_done(PyObject*, PyObject* all) {
  PyObject* function = PyTuple_GetItem(all, 0);
  if (function == nullptr) return nullptr;
  PyObject* arguments = PyTuple_GetSlice(all, 1, PyTuple_GET_SIZE(all));
  if (arguments == nullptr) return nullptr;
  PyObject* result = PyObject_CallObject(function, arguments);
  if (result == nullptr) {
    Raised interrupt;
    call_while_interrupted(function, arguments);
    interrupt.restore();
  }
  Py_DECREF(arguments);
  return result;
}

// call_or_undo(function, undo): the result of function(); if that raises, undo() is called until it returns, and the
// exception is raised after that. undo must be idempotent.
PyObject* call_or_undo(PyObject*, PyObject* all) {
  PyObject *function = nullptr, *undo = nullptr;
  if (!PyArg_ParseTuple(all, "OO", &function, &undo)) return nullptr;
  PyObject* result = PyObject_CallObject(function, nullptr);
  if (result == nullptr) {
    Raised exception;
    call_while_interrupted(undo, nullptr);
    exception.restore();
  }
  return result;
}

}  // namespace memtrace
