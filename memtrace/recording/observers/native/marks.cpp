#include "marks.h"

#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "dispatch.h"
#include "state.h"

namespace memtrace {

PyObject* hide_frames_of(PyObject*, PyObject* code) {
  if (!PyCode_Check(code)) return fail("usage: hide_frames_of(code)");
  hide_code(code);
  Py_RETURN_NONE;
}

PyObject* name_id(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return fail("usage: name_id(kind, text)");
  const long kind = PyLong_AsLong(arguments[0]);
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(arguments[1], &length);
  if (text == nullptr || (kind == -1 && PyErr_Occurred())) return nullptr;
  return PyLong_FromLong(recorder().names.id(static_cast<NameKind>(kind), {text, static_cast<size_t>(length)}));
}

PyObject* push_module(PyObject*, PyObject* name) {
  const long id = PyLong_AsLong(name);
  if (id == -1 && PyErr_Occurred()) return nullptr;
  if (!recorder().active) return PyLong_FromLong(0);
  ThreadState& thread = thread_state();
  if (!thread_enabled()) enable_thread(true);
  thread.modules.emplace_back(static_cast<int32_t>(id), recorder().now());
  return PyLong_FromSize_t(thread.modules.size());
}

// Ends the innermost call of the module, and calls inside it that an exception ended.
PyObject* pop_module(PyObject*, PyObject* name) {
  const long id = PyLong_AsLong(name);
  if (id == -1 && PyErr_Occurred()) return nullptr;
  Recorder& r = recorder();
  ThreadState& thread = thread_state();
  auto& open = thread.modules;
  bool is_open = false;
  for (const auto& module : open) is_open |= module.first == id;
  if (!is_open || !r.active) Py_RETURN_NONE;   // the call began before the recording
  const int64_t now = r.now();
  Lock lock(r.mutex);
  while (true) {
    const auto [module, start] = open.back();
    open.pop_back();
    r.push(Span{start, now - start, kNone, module, thread.index, SpanKind::module});
    if (module == id) break;
  }
  Py_RETURN_NONE;
}

PyObject* begin_backward(PyObject*, PyObject*) {
  ThreadState& thread = thread_state();
  if (thread.backward_calls++ == 0) {
    end_forward(thread);
    thread.modules_outside = thread.modules.size();
  }
  return PyLong_FromLongLong(recorder().now());
}

PyObject* end_backward(PyObject*, PyObject* started_ns) {
  const int64_t start = PyLong_AsLongLong(started_ns);
  if (start == -1 && PyErr_Occurred()) return nullptr;
  Recorder& r = recorder();
  ThreadState& thread = thread_state();
  if (thread.backward_calls == 0 || --thread.backward_calls > 0) Py_RETURN_NONE;
  thread.modules_outside = 0;
  r.add(Span{start, r.now() - start, kNone, r.names.id(NameKind::range, "backward"), thread.index, SpanKind::phase});
  Py_RETURN_NONE;
}

PyObject* span(PyObject*, PyObject* arguments) {
  int kind = 0, name = 0;
  long long start = 0, end = 0, index = 0;
  if (!PyArg_ParseTuple(arguments, "iiLLL", &kind, &name, &start, &end, &index)) return nullptr;
  const int16_t thread = thread_index_or_none();
  if (static_cast<SpanKind>(kind) == SpanKind::step && thread != kNone) end_forward(thread_state());
  recorder().add(Span{start, end - start, index, name, thread, static_cast<SpanKind>(kind)});
  Py_RETURN_NONE;
}

PyObject* waiting(PyObject*, PyObject* on) {
  thread_state().wait_ranges += PyObject_IsTrue(on) ? 1 : -1;
  Py_RETURN_NONE;
}

namespace {

void add_tensor_event(const at::Tensor& tensor, EventKind kind, int category, int32_t name, std::vector<Event>& out) {
  Event event{};
  if (!describe_storage(tensor, event)) return;
  event.kind = kind;
  event.op = category;
  event.detail = name;
  out.push_back(event);
}

}  // namespace

PyObject* label(PyObject*, PyObject* arguments) {
  PyObject *tensors = nullptr, *names = nullptr;
  int category = 0, gradient_category = 0;
  if (!PyArg_ParseTuple(arguments, "O!iO!i", &PyList_Type, &tensors, &category, &PyList_Type, &names, &gradient_category))
    return nullptr;
  std::vector<Event> events;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors) && i < PyList_GET_SIZE(names); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object)) continue;
    const auto name = static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(names, i)));
    const at::Tensor& tensor = THPVariable_Unpack(object);
    add_tensor_event(tensor, EventKind::label, category, name, events);
    if (gradient_category >= 0 && tensor.defined() && tensor.grad().defined())
      add_tensor_event(tensor.grad(), EventKind::label, gradient_category, name, events);
  }
  Recorder& r = recorder();
  const int64_t time = r.now();
  const int16_t thread = thread_index_or_none();
  Lock lock(r.mutex);
  if (!r.active) Py_RETURN_NONE;
  for (Event& event : events) {
    event.time_ns = time;
    event.thread = thread;
    r.push(event);
  }
  Py_RETURN_NONE;
}

PyObject* baseline(PyObject*, PyObject* tensors) {
  if (!PyList_Check(tensors)) return fail("usage: baseline(list of tensors)");
  std::vector<Event> events;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (THPVariable_Check(object)) add_tensor_event(THPVariable_Unpack(object), EventKind::baseline, kNone, kNone, events);
  }
  Recorder& r = recorder();
  Lock lock(r.mutex);
  for (const Event& event : events) r.push(event);
  Py_RETURN_NONE;
}

}  // namespace memtrace
