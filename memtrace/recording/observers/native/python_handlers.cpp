#include "marks.h"   // first: it includes Python.h

#include "python_handlers.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/PyInterpreter.h>

#include <type_traits>
#include <utility>

#include "dispatch.h"
#include "state.h"

namespace memtrace {
namespace {

class IncludedAgain {
 public:
  IncludedAgain() : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kMode)) {
    if (was_excluded_) c10::impl::tls_set_dispatch_key_excluded(kMode, false);
  }
  ~IncludedAgain() {
    if (was_excluded_) c10::impl::tls_set_dispatch_key_excluded(kMode, true);
  }
  IncludedAgain(const IncludedAgain&) = delete;
  IncludedAgain& operator=(const IncludedAgain&) = delete;

 private:
  const bool was_excluded_;
};

// torch's table of functions that call Python, with a `dispatch` that includes our mode again. A function that the base
// of this torch version does not have overrides nothing and is never compiled.
template <typename Base>
struct Forwarding : Base {
  explicit Forwarding(const Base* original) : real(original) {}
  const Base* real;

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const {
    // Within an operator that is recorded as a whole, the mode stays excluded.
    if (!recorder().active.load(std::memory_order_relaxed) || thread_state().current_op != kNone)
      return real->dispatch(op, stack);
    IncludedAgain guard;
    real->dispatch(op, stack);
  }

#define MEMTRACE_FORWARD(result, name, parameters, ...) \
  result name parameters const { return real->name(__VA_ARGS__); }
  using Impl = const c10::TensorImpl*;
  using Type = c10::DeviceType;
  MEMTRACE_FORWARD(std::string, name, ())
  MEMTRACE_FORWARD(void, incref, (PyObject * o), o)
  MEMTRACE_FORWARD(void, decref, (PyObject * o), o)
  MEMTRACE_FORWARD(void, decref, (PyObject * o, bool has_slot), o, has_slot)
  MEMTRACE_FORWARD(bool, try_incref, (const c10::impl::PyObjectSlot& slot), slot)
  MEMTRACE_FORWARD(size_t, refcnt, (PyObject * o), o)
  MEMTRACE_FORWARD(c10::intrusive_ptr<c10::TensorImpl>, detach, (Impl t), t)
  MEMTRACE_FORWARD(void, reportErrorCallback, (PyObject * callback, c10::DispatchKey key), callback, key)
  MEMTRACE_FORWARD(void, python_op_registration_trampoline,
                   (const c10::OperatorHandle& op, c10::DispatchKey key, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack, bool with_keys, bool with_op),
                   op, key, keys, stack, with_keys, with_op)
  MEMTRACE_FORWARD(void, throw_abstract_impl_not_imported_error,
                   (std::string op, const char* module, const char* context), std::move(op), module, context)
  MEMTRACE_FORWARD(void, python_dispatcher,
                   (const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack), op, keys, stack)
  MEMTRACE_FORWARD(bool, is_contiguous, (Impl t, at::MemoryFormat format), t, format)
  MEMTRACE_FORWARD(c10::SymBool, sym_is_contiguous, (Impl t, at::MemoryFormat format), t, format)
  MEMTRACE_FORWARD(bool, is_strides_like, (Impl t, at::MemoryFormat format), t, format)
  MEMTRACE_FORWARD(bool, is_non_overlapping_and_dense, (Impl t), t)
  MEMTRACE_FORWARD(c10::Device, device, (Impl t), t)
  MEMTRACE_FORWARD(int64_t, dim, (Impl t), t)
  MEMTRACE_FORWARD(c10::IntArrayRef, strides, (Impl t), t)
  MEMTRACE_FORWARD(c10::IntArrayRef, sizes, (Impl t), t)
  MEMTRACE_FORWARD(c10::SymIntArrayRef, sym_sizes, (Impl t), t)
  MEMTRACE_FORWARD(c10::Layout, layout, (Impl t), t)
  MEMTRACE_FORWARD(int64_t, numel, (Impl t), t)
  MEMTRACE_FORWARD(c10::SymInt, sym_numel, (Impl t), t)
  MEMTRACE_FORWARD(c10::SymIntArrayRef, sym_strides, (Impl t), t)
  MEMTRACE_FORWARD(c10::SymInt, sym_storage_offset, (Impl t), t)
  MEMTRACE_FORWARD(void, trace_gpu_event_creation, (Type type, uintptr_t event), type, event)
  MEMTRACE_FORWARD(void, trace_gpu_event_deletion, (Type type, uintptr_t event), type, event)
  MEMTRACE_FORWARD(void, trace_gpu_event_record, (Type type, uintptr_t event, uintptr_t stream), type, event, stream)
  MEMTRACE_FORWARD(void, trace_gpu_event_wait, (Type type, uintptr_t event, uintptr_t stream), type, event, stream)
  MEMTRACE_FORWARD(void, trace_gpu_memory_allocation, (Type type, uintptr_t address), type, address)
  MEMTRACE_FORWARD(void, trace_gpu_memory_deallocation, (Type type, uintptr_t address), type, address)
  MEMTRACE_FORWARD(void, trace_gpu_stream_creation, (Type type, uintptr_t stream), type, stream)
  MEMTRACE_FORWARD(void, trace_gpu_device_synchronization, (Type type), type)
  MEMTRACE_FORWARD(void, trace_gpu_stream_synchronization, (Type type, uintptr_t stream), type, stream)
  MEMTRACE_FORWARD(void, trace_gpu_event_synchronization, (Type type, uintptr_t event), type, event)
  MEMTRACE_FORWARD(void, reset_backward_hooks, (Impl t), t)
#undef MEMTRACE_FORWARD
};

template <typename Base>
void exchange_functions(c10::impl::PyInterpreter& interpreter, bool on) {
  // A function that this list lacks leaves the class abstract.
  if constexpr (!std::is_abstract_v<Forwarding<Base>>) {
    static const Forwarding<Base>* forwarding = nullptr;   // never destroyed: another thread may be using it
    if (forwarding == nullptr) forwarding = new Forwarding<Base>(interpreter.vtable_);
    if (on && interpreter.vtable_ == forwarding->real) interpreter.vtable_ = forwarding;
    if (!on && interpreter.vtable_ == forwarding) interpreter.vtable_ = forwarding->real;
  }
}

}  // namespace

bool sees_operators_of_python_handlers() {
  return !std::is_abstract_v<Forwarding<c10::impl::PyInterpreterVTable>>;
}

void see_operators_of_python_handlers(bool on) {
  exchange_functions<c10::impl::PyInterpreterVTable>(*getPyInterpreter(), on);
}

}  // namespace memtrace
