// The frames of the Python code that a thread runs, innermost first.
#pragma once

#include <Python.h>
#include <frameobject.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && __has_include(<internal/pycore_frame.h>)
#define MEMTRACE_INTERPRETER_FRAMES 1
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#define MEMTRACE_INTERPRETER_FRAMES 0
#endif

namespace memtrace {

struct Position {
  PyCodeObject* code;   // borrowed from the frame
  int where;            // instruction offset; before Python 3.11 the line number
};

#if MEMTRACE_INTERPRETER_FRAMES

// Whether the GIL is needed to read the frames of the calling thread. They do not change while it runs C++ code.
constexpr bool kFramesNeedGil = false;

// Calls `visit` with the position of each frame of the calling thread until that returns false. Frame objects, which the
// functions of Python's public interface create, cost more than all the rest of a stack.
template <typename Visit>
void visit_frames(PyThreadState* thread, Visit&& visit) {
#if PY_VERSION_HEX >= 0x030D0000
  _PyInterpreterFrame* frame = thread->current_frame;
#else
  _PyInterpreterFrame* frame = thread->cframe->current_frame;
#endif
  for (; frame != nullptr; frame = frame->previous) {
    if (_PyFrame_IsIncomplete(frame)) continue;
#if PY_VERSION_HEX >= 0x030D0000
    PyCodeObject* code = _PyFrame_GetCode(frame);
#else
    PyCodeObject* code = frame->f_code;
#endif
    if (!visit(Position{code, _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT))})) return;
  }
}

#else

constexpr bool kFramesNeedGil = true;

template <typename Visit>
void visit_frames(PyThreadState* thread, Visit&& visit) {
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_DECREF(code);   // the frame keeps it alive
#if PY_VERSION_HEX >= 0x030B0000
    const Position position{code, PyFrame_GetLasti(frame)};
#else
    const Position position{code, PyFrame_GetLineNumber(frame)};
#endif
    PyFrameObject* back = visit(position) ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
}

#endif

inline int line_of(const Position& position) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyCode_Addr2Line(position.code, position.where);
#else
  return position.where;
#endif
}

}  // namespace memtrace
