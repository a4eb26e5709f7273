#include "marks.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>
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

namespace {

// What the hook of module calls uses: the fields of memtrace.recording.observers.ModuleCalls as a tuple.
enum HookState : Py_ssize_t { known_modules, name_module, label_inputs_of, failed };

// The name of a module, a new reference to an int; null if there is none, or with an error.
PyObject* known_name(PyObject* state, PyObject* key) {
  static PyObject* const attribute = PyUnicode_InternFromString("name_id");
  PyObject* module = PyDict_GetItemWithError(PyTuple_GET_ITEM(state, known_modules), key);
  return module == nullptr ? nullptr : PyObject_GetAttr(module, attribute);
}

PyObject* name_of(PyObject* state, PyObject* module) {
  PyObject* key = PyLong_FromVoidPtr(module);
  if (key == nullptr) return nullptr;
  PyObject* name = known_name(state, key);
  if (name == nullptr && !PyErr_Occurred()) {
    PyObject* none = PyObject_CallOneArg(PyTuple_GET_ITEM(state, name_module), module);
    if (none != nullptr) name = known_name(state, key);
    if (none != nullptr && name == nullptr && !PyErr_Occurred()) name = PyLong_FromLong(kNone);
    Py_XDECREF(none);
  }
  Py_DECREF(key);
  return name;
}

// Whether the call is within no other one, and autograd records it.
bool begin_module_call(int32_t name) noexcept {
  bool is_outermost = false;
  if (!recorder().active) return false;
  record_or_give_up([&] {
    ThreadState& thread = thread_state();
    if (!thread_enabled()) enable_thread(true);
    thread.modules.emplace_back(name, recorder().now());
    is_outermost = thread.modules.size() == 1 && at::GradMode::is_enabled();
  });
  return is_outermost;
}

// Passes the current exception on; false, and the exception stays, if it belongs to the program (KeyboardInterrupt).
bool report_error(PyObject* state) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  PyObject* none = PyObject_CallOneArg(PyTuple_GET_ITEM(state, failed), error);
  Py_XDECREF(none);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
  if (none != nullptr) return true;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyErr_Clear();
  return true;
}

// enter_module(module, args, kwargs) -> the name id of the module, for `pop_module`
PyObject* enter_module(PyObject* state, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return fail("usage: enter_module(module, args, kwargs)");
  PyObject* name = name_of(state, arguments[0]);
  if (name != nullptr && begin_module_call(static_cast<int32_t>(PyLong_AsLong(name)))) {
    PyObject* inputs = PyTuple_Pack(2, arguments[1], arguments[2]);
    PyObject* none = inputs == nullptr ? nullptr : PyObject_CallOneArg(PyTuple_GET_ITEM(state, label_inputs_of), inputs);
    if (none == nullptr) Py_CLEAR(name);
    Py_XDECREF(none);
    Py_XDECREF(inputs);
  }
  return name != nullptr || !report_error(state) ? name : PyLong_FromLong(kNone);
}

PyMethodDef enter_module_definition = {
    "enter_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&enter_module)), METH_FASTCALL, nullptr};

}  // namespace

PyObject* module_hook(PyObject*, PyObject* state) {
  PyObject *known = nullptr, *name = nullptr, *label = nullptr, *error = nullptr;
  if (!PyArg_ParseTuple(state, "O!OOO", &PyDict_Type, &known, &name, &label, &error)) return nullptr;
  return PyCFunction_NewEx(&enter_module_definition, state, nullptr);
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

PyObject* end_phase(PyObject*, PyObject*) {
  if (thread_index_or_none() != kNone) end_forward(thread_state());
  Py_RETURN_NONE;
}

PyObject* waiting(PyObject*, PyObject* on) {
  thread_state().wait_ranges += PyObject_IsTrue(on) ? 1 : -1;
  Py_RETURN_NONE;
}

namespace {

Event event_of(const Memory& memory, EventKind kind, int64_t op, int32_t detail) {
  Event event{};
  event.address = memory.address;
  event.size = memory.size;
  event.device = memory.device;
  event.foreign = memory.origin != Origin::traced;
  event.kind = kind;
  event.op = op;
  event.detail = detail;
  return event;
}

// The events of labels. They are recorded together: they have the same time.
class Labels {
 public:
  Labels() : thread_(thread_index_or_none()), time_(recorder().now()) {}

  void add(const at::Tensor& tensor, int category, int32_t name) {
    const std::optional<Memory> memory = memory_of(tensor);
    if (!memory) return;
    if (begins_at_first_sight(memory->origin) && thread_ != kNone) {
      // No operator allocated it: its allocation is where the program first uses it.
      if (calls_.empty()) calls_.push_back(unnamed_call(thread_state()));
      events_.push_back(event_of(*memory, EventKind::foreign_seen, calls_.front().op, kNone));
    }
    events_.push_back(event_of(*memory, EventKind::label, category, name));
  }

  void record() {
    Recorder& r = recorder();
    Lock lock(r.mutex);
    if (!r.runs()) return;
    for (const OpCall& call : calls_) r.push(call);
    for (Event& event : events_) {
      event.time_ns = time_;
      event.thread = thread_;
      r.push(event);
    }
  }

 private:
  const int16_t thread_;
  const int64_t time_;
  std::vector<Event> events_;
  std::vector<OpCall> calls_;
};

// Whether autograd computed the tensor. Unlike Tensor::grad_fn, the question changes nothing.
bool is_result(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->grad_fn_ != nullptr;
}

}  // namespace

PyObject* label(PyObject*, PyObject* arguments) {
  PyObject *tensors = nullptr, *names = nullptr;
  int category = 0, gradient_category = 0;
  if (!PyArg_ParseTuple(arguments, "O!iO!i", &PyList_Type, &tensors, &category, &PyList_Type, &names, &gradient_category))
    return nullptr;
  Labels labels;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors) && i < PyList_GET_SIZE(names); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object)) continue;
    const auto name = static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(names, i)));
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.defined()) continue;
    labels.add(tensor, category, name);
    // Tensor::grad would warn about a tensor that is not a leaf.
    if (gradient_category < 0) continue;
    const at::Tensor& gradient = tensor.unsafeGetTensorImpl()->grad();
    if (gradient.defined()) labels.add(gradient, gradient_category, name);
  }
  labels.record();
  Py_RETURN_NONE;
}

PyObject* label_inputs(PyObject*, PyObject* arguments) {
  PyObject* tensors = nullptr;
  int category = 0;
  if (!PyArg_ParseTuple(arguments, "O!i", &PyList_Type, &tensors, &category)) return nullptr;
  Labels labels;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.defined() && !is_result(tensor)) labels.add(tensor, category, kNone);
  }
  labels.record();
  Py_RETURN_NONE;
}

PyObject* baseline(PyObject*, PyObject* tensors) {
  if (!PyList_Check(tensors)) return fail("usage: baseline(list of tensors)");
  std::vector<Event> events;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (const auto memory = memory_of(tensor)) events.push_back(event_of(*memory, EventKind::baseline, kNone, kNone));
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    add(tensor);
    // Autograd holds gradients; there may be no Python object of them.
    if (tensor.defined() && tensor.unsafeGetTensorImpl()->grad().defined()) add(tensor.unsafeGetTensorImpl()->grad());
  }
  Recorder& r = recorder();
  const int64_t now = r.now();
  Lock lock(r.mutex);
  for (Event& event : events) {
    if (r.was_paused) event.kind = EventKind::found;
    if (r.was_paused) event.time_ns = now;
    r.push(event);
  }
  Py_RETURN_NONE;
}

namespace {

// Garbage collections that freed objects. Guarded by the GIL: a collection can start while this thread holds our lock.
int64_t collection_start = 0;
auto& collections = *new std::vector<std::pair<int64_t, int64_t>>;

}  // namespace

PyObject* collected(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyUnicode_Check(arguments[0]) || !PyDict_Check(arguments[1])) return fail("usage: collected(phase, info)");
  const int64_t now = recorder().now();
  if (PyUnicode_CompareWithASCIIString(arguments[0], "start") == 0) {
    collection_start = now;
    Py_RETURN_NONE;
  }
  PyObject* num_freed = PyDict_GetItemString(arguments[1], "collected");
  if (num_freed != nullptr && PyLong_CheckExact(num_freed) && PyLong_AsLong(num_freed) > 0)
    record_or_give_up([&] { collections.emplace_back(collection_start, now); });
  PyErr_Clear();
  Py_RETURN_NONE;
}

void record_collections() {
  if (collections.empty()) return;
  Recorder& r = recorder();
  const int32_t name = r.names.id(NameKind::range, "gc");
  for (const auto& [start, end] : collections)
    r.add(Span{start, end - start, kNone, name, kNone, SpanKind::range});
  collections.clear();
}

}  // namespace memtrace
