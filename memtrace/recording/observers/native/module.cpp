// The Python module of the native observer: start, stop and drain. The functions that mark what the program does are in
// marks.cpp, others that memtrace needs in tools.cpp and live_objects.cpp.
#include "marks.h"   // first: it includes Python.h
#include "tools.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "batch.h"
#include "collector.h"
#include "compiled_regions.h"
#include "cuda_allocator.h"
#include "device_time.h"
#include "event_forms.h"
#include "dispatch.h"
#include "foreign_memory.h"
#include "live_objects.h"
#include "pause.h"
#include "python_handlers.h"
#include "state.h"

namespace memtrace {

PyObject* fail(const char* message) {
  PyErr_SetString(PyExc_RuntimeError, message);
  return nullptr;
}

namespace {

// start(accesses, stacks, stack_min_bytes, device_time_min_bytes, collect_records, wake_records, limit_records)
PyObject* start(PyObject*, PyObject* arguments) {
  int accesses = 0, stacks = 0;
  long long stack_min_bytes = 0, device_time_min_bytes = 0;
  Py_ssize_t collect = 0, wake = 0, limit = 0;
  if (!PyArg_ParseTuple(arguments, "ppLLnnn", &accesses, &stacks, &stack_min_bytes, &device_time_min_bytes, &collect,
                        &wake, &limit))
    return nullptr;
  Recorder& r = recorder();
  if (r.runs()) return fail("a recording is already running");
  try {
    install_dispatch_mode();
    {
      Lock lock(r.mutex);
      r.options = {accesses != 0, stacks != 0, stack_min_bytes, static_cast<size_t>(collect), static_cast<size_t>(wake),
                   static_cast<size_t>(limit), device_time_min_bytes};
      r.events.clear();
      r.ops.clear();
      r.spans.clear();
      r.threads.clear();
      r.was_paused = false;
      r.stream_pools.clear();
      r.cuda_attachment = {};
      r.cuda_source = CudaSource::undecided;
    }
    r.names.clear();
    r.next_op = 0;
    r.failure = nullptr;
    r.paused = false;
    r.recording++;
    r.epoch++;
    r.prepare_buffers();
    r.clock.start();
    start_collector();
    install_cpu_allocator(true);
    see_operators_of_python_handlers(true);
    thread_state();   // the thread that starts the recording is thread 0
    r.active = true;
    enable_thread(true);
  } catch (const std::exception& error) {
    install_cpu_allocator(false);
    return fail(error.what());
  }
  Py_RETURN_NONE;
}

PyObject* stop(PyObject*, PyObject*) {
  Recorder& r = recorder();
  enable_thread(false);
  if (r.active) {
    std::vector<ThreadState*> threads;
    {
      Lock lock(r.mutex);
      threads = r.threads;
    }
    for (ThreadState* thread : threads) end_forward(*thread);
    record_collections();
    finish_device_times();
  }
  r.active = r.paused = false;
  install_cpu_allocator(false);
  see_operators_of_python_handlers(false);
  forget_foreign_memory();
  forget_regions();
  release_stacks();
  {
    Lock lock(r.mutex);
    std::vector<Event>().swap(r.spare_events);
    std::vector<OpCall>().swap(r.spare_ops);
  }
  r.wake_writer.notify_all();
  r.buffer_taken.notify_all();
  Py_RETURN_NONE;
}

// exclude_memory(ranges): memory that is not recorded; ranges: [(begin, end)], ascending
PyObject* exclude_ranges(PyObject*, PyObject* rows) {
  if (!PyList_Check(rows)) return fail("ranges of memory must be a list of tuples");
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    unsigned long long begin = 0, end = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(rows, i), "KK", &begin, &end)) return nullptr;
    ranges.emplace_back(begin, end);
  }
  exclude_memory(std::move(ranges));
  Py_RETURN_NONE;
}

// use_typed_kernels(on): for comparisons; call it while no thread records
PyObject* choose_kernels(PyObject*, PyObject* on) {
  install_dispatch_mode();
  use_typed_kernels(PyObject_IsTrue(on) == 1);
  Py_RETURN_NONE;
}

// abandon(): makes the observer of a forked child inert
PyObject* abandon(PyObject*, PyObject*) {
  recorder().active = recorder().paused = false;
  enable_thread(false);
  install_cpu_allocator(false);
  see_operators_of_python_handlers(false);
  Py_RETURN_NONE;
}

PyObject* now(PyObject*, PyObject*) { return PyLong_FromLongLong(recorder().now()); }

// Runs `work` without the interpreter lock; false if there is no memory for it.
template <typename Work>
bool with_memory_without_gil(Work&& work) {
  bool has_memory = true;
  Py_BEGIN_ALLOW_THREADS {
    try {
      work();
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  }
  Py_END_ALLOW_THREADS
  return has_memory;
}

// wait(seconds, enough_events) -> number of records; returns early when there is much to drain
PyObject* wait(PyObject*, PyObject* arguments) {
  double seconds = 0;
  Py_ssize_t enough_events = 0;
  if (!PyArg_ParseTuple(arguments, "dn", &seconds, &enough_events)) return nullptr;
  if (collector() == nullptr) return fail("no recording was started");
  size_t num_records = 0;
  const bool has_memory = with_memory_without_gil([&] {
    num_records = collector()->wait(seconds, static_cast<size_t>(std::max<Py_ssize_t>(enough_events, 0)));
  });
  return has_memory ? PyLong_FromSize_t(num_records) : PyErr_NoMemory();
}

PyObject* wake(PyObject*, PyObject*) {
  Recorder& r = recorder();
  {
    Lock lock(r.mutex);
    r.must_wake = true;
  }
  r.wake_writer.notify_all();
  Py_RETURN_NONE;
}

// The tuple (id, kind, text, frames).
PyObject* name_row(const Names::Row& row) {
  PyObject* frames = PyList_New(static_cast<Py_ssize_t>(row.frames.size()));
  for (size_t i = 0; frames != nullptr && i < row.frames.size(); ++i) {
    PyObject* frame = PyLong_FromLong(row.frames[i]);
    if (frame == nullptr) Py_CLEAR(frames);
    if (frame != nullptr) PyList_SET_ITEM(frames, static_cast<Py_ssize_t>(i), frame);
  }
  if (frames == nullptr) return nullptr;
  PyObject* text = PyUnicode_DecodeUTF8(row.text.data(), static_cast<Py_ssize_t>(row.text.size()), "replace");
  return Py_BuildValue("(iiNN)", row.id, static_cast<int>(row.kind), text, frames);   // handles a text of null
}

PyObject* names_list() {
  std::vector<Names::Row> rows = recorder().names.take_new();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(rows.size()));
  for (size_t i = 0; list != nullptr && i < rows.size(); ++i) {
    PyObject* row = name_row(rows[i]);
    if (row == nullptr) Py_CLEAR(list);
    if (row != nullptr) PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), row);
  }
  return list;
}

// drain(until_ns) -> {"events.time_ns": column, ..., "names": [(id, kind, text, frames)]}, with the columns as batch.h
// describes them; until_ns -1 drains everything
PyObject* drain(PyObject*, PyObject* until) {
  if (collector() == nullptr) return fail("no recording was started");
  const int64_t until_ns = PyLong_AsLongLong(until);
  if (until_ns == -1 && PyErr_Occurred()) return nullptr;
  record_collections();
  std::vector<BatchColumn> columns;
  const bool has_memory = with_memory_without_gil([&] {
    collector()->collect(until_ns);
    columns = batch_columns(collector()->take_rows());
  });
  if (!has_memory) return PyErr_NoMemory();
  PyObject* out = PyDict_New();
  PyObject* names = names_list();
  if (out == nullptr || names == nullptr || !put_columns(out, std::move(columns)) ||
      PyDict_SetItemString(out, "names", names) != 0) {
    Py_XDECREF(out);
    Py_XDECREF(names);
    return nullptr;
  }
  Py_DECREF(names);
  return out;
}

// rows: [(kind, device, address, size, stream, pool, extra, time_ns)]
bool parse_cuda_rows(PyObject* rows, std::vector<CudaEvent>& events) {
  if (!PyList_Check(rows)) return fail("the events of the CUDA allocator must be a list of tuples") != nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    int kind = 0, device = 0;
    unsigned long long address = 0;
    long long size = 0, stream = 0, pool = 0, extra = 0, time_ns = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(rows, i), "iiKLLLLL", &kind, &device, &address, &size, &stream, &pool, &extra, &time_ns))
      return false;
    events.push_back({static_cast<EventKind>(kind), device, address, size, stream, pool, extra, time_ns});
  }
  return true;
}

// cuda_events(rows): events of the CUDA allocator from sources other than its trace tracker: torch's own history, tests
PyObject* cuda_events(PyObject*, PyObject* rows) {
  std::vector<CudaEvent> events;
  if (!parse_cuda_rows(rows, events)) return nullptr;
  for (const CudaEvent& event : events) record_cuda_event(event);
  Py_RETURN_NONE;
}

// finish_cuda(rows, has_events): the blocks and segments that exist, and whether the allocator's events will follow;
// otherwise blocks are known by the storages of tensors
PyObject* finish_cuda(PyObject*, PyObject* arguments) {
  PyObject* rows = nullptr;
  int has_events = 0;
  std::vector<CudaEvent> events;
  if (!PyArg_ParseTuple(arguments, "Op", &rows, &has_events) || !parse_cuda_rows(rows, events)) return nullptr;
  finish_cuda_attachment(events, has_events ? CudaSource::events : CudaSource::storages);
  Py_RETURN_NONE;
}

// attach_cuda() -> whether the CUDA allocator reports its events; they are recorded from its next snapshot on
PyObject* attach_cuda(PyObject*, PyObject*) { return PyBool_FromLong(attach_cuda_allocator()); }

// cuda_settings(divisions: tuple of int or None, max_split_size)
PyObject* cuda_settings(PyObject*, PyObject* arguments) {
  PyObject* divisions = nullptr;
  long long max_split_size = 0;
  if (!PyArg_ParseTuple(arguments, "OL", &divisions, &max_split_size)) return nullptr;
  CudaSettings settings{std::nullopt, max_split_size};
  if (divisions != Py_None) {
    settings.divisions.emplace();
    const Py_ssize_t count = PyTuple_Size(divisions);
    for (Py_ssize_t i = 0; i < count; ++i) settings.divisions->push_back(PyLong_AsLongLong(PyTuple_GetItem(divisions, i)));
    if (PyErr_Occurred()) return nullptr;
  }
  Lock lock(recorder().mutex);
  recorder().cuda_settings = std::move(settings);
  Py_RETURN_NONE;
}

// status() -> {"active": bool, ...}; "failure" is why the recording ended by itself, or None
PyObject* status(PyObject*, PyObject*) {
  Recorder& r = recorder();
  return Py_BuildValue("{s:O,s:z,s:O,s:O,s:O,s:O,s:i}", "active", r.active ? Py_True : Py_False, "failure",
                       r.failure.load(), "thread_enabled", thread_enabled() ? Py_True : Py_False, "cuda",
                       cuda_supported() ? Py_True : Py_False, "device_time",
                       device_time_supported() ? Py_True : Py_False, "python_handlers",
                       sees_operators_of_python_handlers() ? Py_True : Py_False, "dispatch_key",
                       static_cast<int>(kMode));
}

// `Function` as a function of the module: C++ exceptions become Python exceptions.
template <PyObject* (*Function)(PyObject*, PyObject*)>
PyObject* checked(PyObject* module, PyObject* arguments) {
  try {
    return Function(module, arguments);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

// A `Function` that marks what the program does. It is called by the program's own code, so it must not fail: the
// recording ends instead, and the result is 0.
template <PyObject* (*Function)(PyObject*, PyObject*)>
PyObject* marking(PyObject* module, PyObject* arguments) {
  PyObject* result = nullptr;
  bool has_failed = true;
  record_or_give_up([&] {
    result = Function(module, arguments);
    has_failed = false;
  });
  if (has_failed) return PyLong_FromLong(0);
  if (result != nullptr || !PyErr_ExceptionMatches(PyExc_MemoryError)) return result;
  PyErr_Clear();
  recorder().give_up(kNoMemory);
  return PyLong_FromLong(0);
}

PyMethodDef methods[] = {
    {"start", checked<start>, METH_VARARGS, nullptr},
    {"stop", checked<stop>, METH_NOARGS, nullptr},
    {"pause", checked<pause>, METH_NOARGS, nullptr},
    {"resume", checked<resume>, METH_NOARGS, nullptr},
    {"exclude_memory", checked<exclude_ranges>, METH_O, nullptr},
    {"use_typed_kernels", checked<choose_kernels>, METH_O, nullptr},
    {"abandon", checked<abandon>, METH_NOARGS, nullptr},
    {"wait", checked<wait>, METH_VARARGS, nullptr},
    {"wake", checked<wake>, METH_NOARGS, nullptr},
    {"drain", checked<drain>, METH_O, nullptr},
    {"name_id", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&name_id)), METH_FASTCALL, nullptr},
    {"hide_frames_of", checked<hide_frames_of>, METH_O, nullptr},
    {"module_hook", checked<module_hook>, METH_VARARGS, nullptr},
    {"pop_module", marking<pop_module>, METH_O, nullptr},
    {"begin_backward", marking<begin_backward>, METH_NOARGS, nullptr},
    {"end_backward", marking<end_backward>, METH_O, nullptr},
    {"span", marking<span>, METH_VARARGS, nullptr},
    {"end_phase", marking<end_phase>, METH_NOARGS, nullptr},
    {"waiting", marking<waiting>, METH_O, nullptr},
    {"now", now, METH_NOARGS, nullptr},
    {"label", marking<label>, METH_VARARGS, nullptr},
    {"label_inputs", marking<label_inputs>, METH_VARARGS, nullptr},
    {"baseline", marking<baseline>, METH_O, nullptr},
    {"watch_region", checked<watch_region>, METH_VARARGS, nullptr},
    {"observed_kernel", checked<observed_kernel>, METH_VARARGS, nullptr},
    {"collected", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&collected)), METH_FASTCALL, nullptr},
    {"cuda_events", checked<cuda_events>, METH_O, nullptr},
    {"attach_cuda", checked<attach_cuda>, METH_NOARGS, nullptr},
    {"finish_cuda", checked<finish_cuda>, METH_VARARGS, nullptr},
    {"cuda_settings", checked<cuda_settings>, METH_VARARGS, nullptr},
    {"status", status, METH_NOARGS, nullptr},
    {"call_until_done", call_until_done, METH_VARARGS, nullptr},
    {"call_or_undo", call_or_undo, METH_VARARGS, nullptr},
    {"event_forms", checked<event_forms>, METH_VARARGS, nullptr},
    {"live_instances", checked<live_instances>, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "memtrace_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

void wait_for_writer() {
  Recorder& r = recorder();
  const bool holds_gil = PyGILState_Check() != 0;
  PyThreadState* saved = holds_gil ? PyEval_SaveThread() : nullptr;   // the writer needs the GIL
  {
    std::unique_lock<SpinLock> lock(r.mutex);
    r.wake_writer.notify_one();
    const bool was_taken = r.buffer_taken.wait_for(lock, std::chrono::seconds(10), [&] {
      return !r.active || r.events.size() + r.ops.size() <= r.options.limit_records;
    });
    if (!was_taken) r.give_up("the disk does not keep up with the program");
  }
  if (saved != nullptr) PyEval_RestoreThread(saved);
}

}  // namespace memtrace

PyMODINIT_FUNC PyInit_memtrace_native() {
  return memtrace::prepare_column_type() ? PyModule_Create(&memtrace::definition) : nullptr;
}
