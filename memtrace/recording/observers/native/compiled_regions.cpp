#include "compiled_regions.h"   // first: it includes Python.h

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <unordered_map>

#include "device_time.h"
#include "dispatch.h"
#include "marks.h"
#include "state.h"

namespace memtrace {
namespace {

constexpr char kReads = 1, kWrites = 2;

// Between the generated code and the dispatcher: torch.ops.<operator>, and dispatch modes such as the one in which torch
// checks the operators of a first call.
constexpr int kMaxFramesAboveRegion = 8;

// By code object, which is kept alive. Guarded by the GIL.
auto& regions = *new std::unordered_map<PyCodeObject*, std::vector<RegionSite>>;
std::atomic<bool> has_regions{false};

const RegionSite* site_of_running_code() {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  const RegionSite* site = nullptr;
  for (int depth = 0; frame != nullptr && site == nullptr && depth < kMaxFramesAboveRegion; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_DECREF(code);   // the frame keeps it alive
    if (regions.count(code) != 0) site = find_region_site(code, PyFrame_GetLineNumber(frame));
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

}  // namespace

const RegionSite* find_region_site(PyCodeObject* code, int line) {
  const auto region = regions.find(code);
  if (region == regions.end()) return nullptr;
  const std::vector<RegionSite>& sites = region->second;
  const auto after = std::upper_bound(sites.begin(), sites.end(), line,
                                      [](int number, const RegionSite& site) { return number < site.first_line; });
  return after == sites.begin() ? nullptr : &*(after - 1);
}

bool attribute_to_region(OpCall& call, bool may_wait) {
  if (!has_regions.load(std::memory_order_relaxed)) return false;
  // As in python_stack.
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) return false;
  if (!may_wait && !PyGILState_Check()) return false;
  const PyGILState_STATE gil = PyGILState_Ensure();
  const RegionSite* site = site_of_running_code();
  if (site != nullptr) {
    if (site->module != kNone) call.module = site->module;
    if (call.phase == Phase::other) call.phase = site->phase;
    call.has_site = site->module != kNone;
  }
  PyGILState_Release(gil);
  return site != nullptr;
}

void forget_regions() {
  has_regions = false;
  for (const auto& [code, sites] : regions) Py_DECREF(code);
  regions.clear();
}

// watch_region(code, [(first_line, module, phase, generated frame, [frame, ...]), ...]), by ascending lines
PyObject* watch_region(PyObject*, PyObject* arguments) {
  PyObject *code = nullptr, *rows = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyCode_Type, &code, &PyList_Type, &rows)) return nullptr;
  std::vector<RegionSite> sites;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); ++i) {
    RegionSite site{};
    int phase = 0;
    PyObject* frames = nullptr;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(rows, i), "iiiiO!", &site.first_line, &site.module, &phase, &site.generated_frame,
                          &PyList_Type, &frames))
      return nullptr;
    site.phase = static_cast<Phase>(phase);
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(frames); ++k)
      site.frames.push_back(static_cast<int32_t>(PyLong_AsLong(PyList_GET_ITEM(frames, k))));
    if (PyErr_Occurred()) return nullptr;
    sites.push_back(std::move(site));
  }
  auto [region, is_new] = regions.insert_or_assign(reinterpret_cast<PyCodeObject*>(code), std::move(sites));
  if (is_new) Py_INCREF(code);
  has_regions = true;
  Py_RETURN_NONE;
}

namespace {

struct ObservedKernel {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* kernel;
  PyObject* method;       // name of the method that launches the kernel; nullptr if it is called itself
  std::string* accesses;  // of each tensor argument, kReads and kWrites
  int32_t name;
  uint32_t recording;     // number of the recording that `name` belongs to
};

struct KernelAccess {
  Memory memory;
  char accesses;
};

// Records one call of a kernel from its start (constructor) to its end (destructor), even if the kernel throws.
class KernelCall {
 public:
  KernelCall(const ObservedKernel& kernel, PyObject* const* arguments, size_t num_arguments) : thread_(thread_state()) {
    Recorder& r = recorder();
    call_ = unnamed_call(thread_);
    call_.name = kernel.name;
    thread_.current_op = call_.op;
    thread_.op_blocks.clear();
    thread_.op_allocated_bytes = 0;
    thread_.op_freed = false;
    std::atomic_ref(thread_.op_start_ns).store(call_.start_ns, std::memory_order_relaxed);
    if (r.options.accesses) record_or_give_up([&] { add_accesses(*kernel.accesses, arguments, num_arguments); });
    if (r.options.device_time_min_bytes != kNone) start_on_device(r.options.device_time_min_bytes);
    push(kReads, EventKind::read, call_.start_ns);
  }

  ~KernelCall() {
    Recorder& r = recorder();
    const int64_t end = r.now();
    if (ticket_ != kNotTimed) end_device_time(ticket_, call_.op, device_);
    thread_.current_op = kNone;
    thread_.op_blocks.clear();
    call_.duration_ns = end - call_.start_ns;
    if (call_.phase == Phase::forward) {
      if (thread_.forward_start == kNone) thread_.forward_start = call_.start_ns;
      thread_.forward_end = end;
    }
    push(kWrites, EventKind::write, end);
    bool is_full;
    {
      Lock lock(r.mutex);
      r.push(call_);
      r.notify_writer_if_due();
      is_full = r.events.size() + r.ops.size() > r.options.limit_records;
    }
    std::atomic_ref(thread_.op_start_ns).store(kNone, std::memory_order_relaxed);
    if (is_full) wait_for_writer();
  }

  KernelCall(const KernelCall&) = delete;
  KernelCall& operator=(const KernelCall&) = delete;

 private:
  // A tensor argument without an entry of its own may be read and written.
  void add_accesses(const std::string& accesses, PyObject* const* arguments, size_t num_arguments) {
    size_t number = 0;
    for (size_t i = 0; i < num_arguments; ++i) {
      if (!THPVariable_Check(arguments[i])) continue;
      const char access = number < accesses.size() ? accesses[number] : static_cast<char>(kReads | kWrites);
      ++number;
      const at::Tensor& tensor = THPVariable_Unpack(arguments[i]);
      const std::optional<Memory> memory = tensor.defined() ? memory_of(tensor) : std::nullopt;
      if (!memory) continue;
      const auto known = std::find_if(accesses_.begin(), accesses_.end(), [&](const KernelAccess& other) {
        return other.memory.address == memory->address && other.memory.device == memory->device;
      });
      if (known == accesses_.end()) accesses_.push_back({*memory, access});
      else known->accesses = static_cast<char>(known->accesses | access);
    }
  }

  void start_on_device(int64_t min_bytes) {
    for (const KernelAccess& access : accesses_) {
      if (access.memory.device == 0 || access.memory.size < min_bytes) continue;
      device_ = access.memory.device;
      ticket_ = start_device_time(device_);
      return;
    }
  }

  void push(char which, EventKind kind, int64_t time) {
    Recorder& r = recorder();
    Lock lock(r.mutex);
    for (const auto& [memory, accesses] : accesses_)
      if (accesses & which)
        r.push(Event{time, memory.address, memory.size, call_.op, kNone, thread_.index, memory.device, kind,
                     memory.origin != Origin::traced});
  }

  ThreadState& thread_;
  OpCall call_{};
  c10::SmallVector<KernelAccess, 16> accesses_;
  uint64_t ticket_ = kNotTimed;   // of the GPU timing
  int8_t device_ = 0;
};

PyObject* launch(const ObservedKernel& kernel, PyObject* const* arguments, size_t flags, PyObject* names) {
  if (kernel.method == nullptr) return PyObject_Vectorcall(kernel.kernel, arguments, flags, names);
  PyObject* method = PyObject_GetAttr(kernel.kernel, kernel.method);
  if (method == nullptr) return nullptr;
  PyObject* result = PyObject_Vectorcall(method, arguments, flags, names);
  Py_DECREF(method);
  return result;
}

PyObject* call_kernel(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  const auto& kernel = *reinterpret_cast<ObservedKernel*>(self);
  Recorder& r = recorder();
  const bool is_recorded =
      r.active.load(std::memory_order_relaxed) && kernel.recording == r.recording.load(std::memory_order_relaxed);
  // An operator that is running is recorded as a whole.
  if (!is_recorded || thread_state().current_op != kNone) return launch(kernel, arguments, flags, names);
  const size_t num_names = names == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(names));
  std::optional<KernelCall> call;
  record_or_give_up([&] { call.emplace(kernel, arguments, static_cast<size_t>(PyVectorcall_NARGS(flags)) + num_names); });
  return launch(kernel, arguments, flags, names);
}

// Other code than the generated code may ask a kernel for its attributes.
PyObject* get_attribute(PyObject* self, PyObject* name) {
  const auto& kernel = *reinterpret_cast<ObservedKernel*>(self);
  if (kernel.method != nullptr && PyUnicode_Compare(name, kernel.method) == 0) return Py_NewRef(self);
  return PyObject_GetAttr(kernel.kernel, name);
}

void destroy(PyObject* self) {
  auto* kernel = reinterpret_cast<ObservedKernel*>(self);
  Py_XDECREF(kernel->kernel);
  Py_XDECREF(kernel->method);
  delete kernel->accesses;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject* kernel_type() {
  static PyTypeObject type = [] {
    PyTypeObject made = {PyVarObject_HEAD_INIT(nullptr, 0)};
    made.tp_name = "memtrace_native.ObservedKernel";
    made.tp_basicsize = sizeof(ObservedKernel);
    made.tp_dealloc = destroy;
    made.tp_vectorcall_offset = offsetof(ObservedKernel, vectorcall);
    made.tp_call = PyVectorcall_Call;
    made.tp_getattro = get_attribute;
    made.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    return made;
  }();
  static const bool is_ready = PyType_Ready(&type) == 0;
  return is_ready ? &type : nullptr;
}

}  // namespace

// observed_kernel(kernel, method or None, name, accesses) -> a callable in place of the kernel
PyObject* observed_kernel(PyObject*, PyObject* arguments) {
  PyObject *kernel = nullptr, *method = nullptr;
  int name = 0;
  const char* accesses = nullptr;
  Py_ssize_t num_accesses = 0;
  if (!PyArg_ParseTuple(arguments, "OOiy#", &kernel, &method, &name, &accesses, &num_accesses)) return nullptr;
  if (method != Py_None && !PyUnicode_Check(method)) return fail("the method of a kernel must be a string");
  PyTypeObject* type = kernel_type();
  if (type == nullptr) return nullptr;
  auto* observed = PyObject_New(ObservedKernel, type);
  if (observed == nullptr) return nullptr;
  observed->vectorcall = call_kernel;
  observed->kernel = Py_NewRef(kernel);
  observed->method = method == Py_None ? nullptr : Py_NewRef(method);
  observed->accesses = new std::string(accesses, static_cast<size_t>(num_accesses));
  observed->name = name;
  observed->recording = recorder().recording;
  return reinterpret_cast<PyObject*>(observed);
}

}  // namespace memtrace
