// Records the Python stack of the calling thread, with one row in `names` for every distinct stack.
#include "marks.h"   // first: it includes Python.h

#include <frameobject.h>

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "state.h"

namespace memtrace {
namespace {

constexpr int kMaxDepth = 128;

struct Position {
  PyCodeObject* code;
  int where;   // instruction offset; before Python 3.11 the line number
};

// Guarded by the GIL. Code objects are kept alive as long as their addresses identify them.
auto& stacks = *new std::unordered_map<uint64_t, int32_t>;
auto& hidden_code = *new std::unordered_set<PyCodeObject*>;   // never released: a few functions of memtrace
auto& kept_code = *new std::unordered_set<PyCodeObject*>;

int position_in(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

int line_of(const Position& position) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyCode_Addr2Line(position.code, position.where);
#else
  return position.where;
#endif
}

std::string text_of(PyObject* text) {
  Py_ssize_t length = 0;
  const char* bytes = text == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(text, &length);
  if (bytes == nullptr) {
    PyErr_Clear();
    return "?";
  }
  std::string clean(bytes, static_cast<size_t>(length));
  for (char& c : clean)
    if (c == '\t') c = ' ';   // tabs separate the parts of a frame's name
  return clean;
}

int32_t intern(const Position* positions, int depth) {
  std::vector<int32_t> frames;
  frames.reserve(static_cast<size_t>(depth));
  for (int i = 0; i < depth; ++i) {
    PyCodeObject* code = positions[i].code;
    if (kept_code.insert(code).second) Py_INCREF(code);
    PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_qualname");
    if (name == nullptr) {
      PyErr_Clear();
      name = Py_NewRef(code->co_name);
    }
    frames.push_back(recorder().names.id(
        NameKind::frame, text_of(code->co_filename) + "\t" + std::to_string(line_of(positions[i])) + "\t" + text_of(name)));
    Py_DECREF(name);
  }
  return recorder().names.add_stack(std::move(frames));
}

int32_t walk_stack() {
  Position positions[kMaxDepth];
  int depth = 0;
  uint64_t hash = 1469598103934665603ull;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && depth < kMaxDepth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_DECREF(code);   // the frame keeps it alive
    if (hidden_code.count(code) == 0) {
      const Position position{code, position_in(frame)};
      positions[depth++] = position;
      for (uint64_t part : {reinterpret_cast<uint64_t>(code), static_cast<uint64_t>(position.where)}) {
        hash = (hash ^ part) * 1099511628211ull;
        hash ^= hash >> 29;
      }
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (depth == 0) return kNone;
  auto known = stacks.find(hash);
  if (known != stacks.end()) return known->second;
  // Looking up names runs no user code, but must not clear a pending exception.
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const int32_t id = intern(positions, depth);
  PyErr_Restore(type, value, traceback);
  stacks.emplace(hash, id);
  return id;
}

}  // namespace

int32_t python_stack(bool may_wait) {
  // A thread that Python does not know has no frames. Waiting for the GIL there could deadlock: the thread that holds
  // the GIL may be waiting for this one (parallel_for).
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return kNone;
  if (!may_wait && !PyGILState_Check()) return kNone;
  const PyGILState_STATE gil = PyGILState_Ensure();
  int32_t id = kNone;
  record_or_give_up([&] { id = walk_stack(); });
  PyGILState_Release(gil);
  return id;
}

void hide_code(PyObject* code) {
  if (hidden_code.insert(reinterpret_cast<PyCodeObject*>(code)).second) Py_INCREF(code);
}

void release_stacks() {
  for (PyCodeObject* code : kept_code) Py_DECREF(code);
  kept_code.clear();
  stacks.clear();
}

}  // namespace memtrace
