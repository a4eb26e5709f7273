#include "tools.h"   // first: it includes Python.h

#include <unordered_map>

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

// instances(objects, types) -> a list for each of the types: the objects that are instances of it by their own type. Asks
// no object for anything, so that no code of the program runs.
PyObject* instances(PyObject*, PyObject* arguments) {
  PyObject *objects = nullptr, *types = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &objects, &PyTuple_Type, &types)) return nullptr;
  PyObject* found = PyList_New(0);
  for (Py_ssize_t i = 0; found != nullptr && i < PyTuple_GET_SIZE(types); ++i) {
    PyObject* list = PyList_New(0);
    if (list == nullptr || PyList_Append(found, list) < 0) Py_CLEAR(found);
    Py_XDECREF(list);
  }
  std::unordered_map<PyTypeObject*, PyObject*> target_by_type;   // a process has few types and many objects
  PyTypeObject* last_type = nullptr;
  PyObject* target = nullptr;
  for (Py_ssize_t i = 0; found != nullptr && i < PyList_GET_SIZE(objects); ++i) {
    PyObject* object = PyList_GET_ITEM(objects, i);
    if (Py_TYPE(object) != last_type) {
      last_type = Py_TYPE(object);
      const auto [entry, is_new] = target_by_type.try_emplace(last_type, nullptr);
      for (Py_ssize_t k = 0; is_new && k < PyTuple_GET_SIZE(types); ++k) {
        auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types, k));
        if (entry->second == nullptr && PyType_IsSubtype(last_type, base)) entry->second = PyList_GET_ITEM(found, k);
      }
      target = entry->second;
    }
    if (target != nullptr && PyList_Append(target, object) < 0) Py_CLEAR(found);
  }
  return found;
}

}  // namespace memtrace
