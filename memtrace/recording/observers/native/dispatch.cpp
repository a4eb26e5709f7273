// The dispatcher mode: kernels on a dispatch key that torch reserves for out-of-tree modes. It is enabled per thread, sees
// every operator before autograd does, with its schema and arguments, and redispatches below itself. Frequent operators
// have kernels of their own (typed_kernels.h), composite ones are skipped, all others have a boxed fallback.
#include "compiled_regions.h"   // first: it includes Python.h
#include "dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <algorithm>
#include <stdexcept>

#include "compiled_regions.h"
#include "operator_call.h"
#include "operator_info.h"
#include "state.h"
#include "typed_kernels.h"

namespace memtrace {
namespace {

void enter_range(const std::string& name, ThreadState& thread) {
  Recorder& r = recorder();
  OpenRange range{r.names.id(NameKind::range, name), r.now(), starts_with(name, "Optimizer."),
                  starts_with(name, "enumerate(DataLoader)#")};
  if (range.optimizer && thread.optimizer_ranges++ == 0) {
    end_forward(thread);
    thread.modules_outside = thread.modules.size();
  }
  range.data_wait = range.data_wait && thread.wait_ranges++ == 0;
  thread.ranges.push_back(range);
}

}  // namespace

void exit_range(ThreadState& thread) {
  if (thread.ranges.empty()) return;   // the range was entered before the recording
  Recorder& r = recorder();
  const OpenRange range = thread.ranges.back();
  thread.ranges.pop_back();
  const int64_t duration = r.now() - range.start_ns;
  r.add(Span{range.start_ns, duration, kNone, range.name, thread.index, SpanKind::range});
  if (range.data_wait) {
    thread.wait_ranges--;
    r.add(Span{range.start_ns, duration, kNone, kNone, thread.index, SpanKind::data_wait});
  }
  if (range.optimizer && thread.optimizer_ranges > 0 && --thread.optimizer_ranges == 0) {
    thread.modules_outside = 0;
    r.add(Span{range.start_ns, duration, kNone, r.names.id(NameKind::range, "optimizer"), thread.index, SpanKind::phase});
  }
}

namespace {

void add_arguments(Call& call, const OperatorInfo& info, const torch::jit::Stack& stack) {
  const c10::IValue* arguments = stack.data() + stack.size() - info.num_arguments;
  for (const ArgumentAccess& access : info.accesses) {
    const c10::IValue& value = arguments[access.index];
    if (value.isTensor()) {
      call.add_argument(value.toTensor(), access.reads, access.writes);
    } else if (access.is_list && value.isList()) {
      for (const c10::IValue& element : value.toListRef())
        if (element.isTensor()) call.add_argument(element.toTensor(), access.reads, access.writes);
    }
  }
}

void add_results(Call& call, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t num_results = std::min(op.schema().returns().size(), stack.size());
  for (size_t i = stack.size() - num_results; i < stack.size(); ++i) {
    if (stack[i].isTensor()) call.add_result(stack[i].toTensor());
    if (!stack[i].isTensorList()) continue;
    for (const c10::IValue& element : stack[i].toListRef())
      if (element.isTensor()) call.add_result(element.toTensor());
  }
}

void observe_range(const OperatorInfo& info, const torch::jit::Stack& stack) {
  record_or_give_up([&] {
    ThreadState& thread = thread_state();
    if (info.role == Role::range_exit) exit_range(thread);
    if (info.role != Role::range_enter) return;
    const c10::IValue& name = stack[stack.size() - info.num_arguments];
    if (name.isString()) enter_range(name.toStringRef(), thread);
  });
}

void observe(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below = keys & kBelowMode;
  const OperatorInfo* inspected = info_of_call(op);
  if (inspected == nullptr) return op.redispatchBoxed(below, stack);
  const OperatorInfo& info = *inspected;
  const Way way = way_of(info, keys);
  if (way != Way::call) {
    if (way == Way::nothing) observe_range(info, *stack);
    Passage passage(info, way);
    return op.redispatchBoxed(below, stack);
  }
  Call call(info);
  if (call.records_accesses()) record_or_give_up([&] { add_arguments(call, info, *stack); });
  call.begin();
  op.redispatchBoxed(below, stack);
  if (call.adds_results()) record_or_give_up([&] { add_results(call, op, *stack); });
}

std::vector<TypedKernels::Register>& all_typed_kernels() {
  static auto* all = new std::vector<TypedKernels::Register>;
  return *all;
}

// Lets torch's composite operators pass without a kernel of the mode: nothing is recorded of them but the operators that
// they call. Programs may add kernels to their own operators at any time, so those go through the fallback.
void skip_composite_operators(std::vector<std::optional<c10::RegistrationHandleRAII>>& registrations) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) continue;
    const std::optional<c10::OperatorHandle> op = dispatcher.findSchema(name);
    if (!op || !is_composite(*op) || op->hasKernelForDispatchKey(kMode)) continue;
    registrations.push_back(
        dispatcher.registerImpl(name, kMode, c10::KernelFunction::makeFallthrough(), std::nullopt, nullptr, "memtrace"));
  }
}

}  // namespace

void install_dispatch_mode() {
  static c10::RegistrationHandleRAII* registration = nullptr;
  if (registration != nullptr) return;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(kMode))
    throw std::runtime_error("another library uses the dispatch key DeferredInit");
  // Never unregistered: the key may still be enabled in a thread when a recording ends.
  registration = new c10::RegistrationHandleRAII(
      dispatcher.registerFallback(kMode, c10::KernelFunction::makeFromBoxedFunction<&observe>(), "memtrace"));
  use_typed_kernels(true);
}

TypedKernels::TypedKernels(std::vector<Register> kernels) {
  all_typed_kernels().insert(all_typed_kernels().end(), kernels.begin(), kernels.end());
}

void use_typed_kernels(bool on) {
  static auto& registrations = *new std::vector<std::optional<c10::RegistrationHandleRAII>>;
  if (on == !registrations.empty()) return;
  registrations.clear();
  if (!on) return;
  skip_composite_operators(registrations);
  for (TypedKernels::Register register_kernel : all_typed_kernels()) registrations.push_back(register_kernel());
}

void enable_thread(bool on) { c10::impl::tls_set_dispatch_key_included(kMode, on); }
bool thread_enabled() { return c10::impl::tls_is_dispatch_key_included(kMode); }

OpCall unnamed_call(ThreadState& thread) {
  Recorder& r = recorder();
  OpCall call{};
  call.op = r.next_op++;
  call.start_ns = r.now();
  call.sequence_nr = call.name = call.stack = kNone;
  call.module = thread.modules.empty() ? kNone : thread.modules.back().first;
  call.thread = thread.index;
  call.phase = current_phase(thread);
  call.has_accesses = true;
  if (attribute_to_region(call, false)) call.name = r.names.id(NameKind::op, "inductor::empty_strided");
  if (r.options.stacks) call.stack = python_stack(false);
  return call;
}

}  // namespace memtrace
