// Kernels of the dispatcher mode for single operators, with the operator's own signature. For an operator without one,
// torch packs all arguments into a stack for the fallback (dispatch.cpp) and unpacks them again below it, which costs more
// than recording does. What is recorded is the same.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "operator_call.h"

namespace memtrace {

// Calls `visit` with each tensor in an argument or a result; other values have none.
template <typename Visit>
void visit_tensors(const at::Tensor& tensor, Visit&& visit) { visit(tensor); }
template <typename Visit>
void visit_tensors(const std::optional<at::Tensor>& tensor, Visit&& visit) {
  if (tensor.has_value()) visit(*tensor);
}
template <typename Visit>
void visit_tensors(at::ArrayRef<at::Tensor> tensors, Visit&& visit) {
  for (const at::Tensor& tensor : tensors) visit(tensor);
}
template <typename Visit>
void visit_tensors(const std::vector<at::Tensor>& tensors, Visit&& visit) {
  for (const at::Tensor& tensor : tensors) visit(tensor);
}
template <typename Visit>
void visit_tensors(const at::ITensorListRef& tensors, Visit&& visit) {
  for (const at::Tensor& tensor : tensors) visit(tensor);
}
template <typename Visit>
void visit_tensors(const c10::List<std::optional<at::Tensor>>& tensors, Visit&& visit) {
  for (size_t i = 0; i < tensors.size(); ++i) visit_tensors(tensors.get(i), visit);
}
template <typename... Values, typename Visit>
void visit_tensors(const std::tuple<Values...>& values, Visit&& visit);

template <typename Value, typename Visit>
void visit_any(const Value& value, Visit&& visit) {
  if constexpr (requires { visit_tensors(value, visit); }) visit_tensors(value, visit);
}
template <typename... Values, typename Visit>
void visit_tensors(const std::tuple<Values...>& values, Visit&& visit) {
  std::apply([&](const auto&... value) { (visit_any(value, visit), ...); }, values);
}

template <size_t index, typename Argument>
void add_argument(Call& call, const OperatorInfo& info, const Argument& argument) {
  static_assert(index < kMaxTypedArguments);
  const bool reads = info.reads >> index & 1, writes = info.writes >> index & 1;
  if (!reads && !writes) return;
  visit_any(argument, [&](const at::Tensor& tensor) { call.add_argument(tensor, reads, writes); });
}

template <typename... Arguments, size_t... index>
void add_arguments(Call& call, const OperatorInfo& info, std::index_sequence<index...>, const Arguments&... arguments) {
  record_or_give_up([&] { (add_argument<index>(call, info, arguments), ...); });
}

// `Op` is a class of torch's namespace at::_ops.
template <typename Op, typename Signature = typename Op::schema>
struct TypedKernel;

template <typename Op, typename Result, typename... Arguments>
struct TypedKernel<Op, Result(Arguments...)> {
  inline static const c10::OperatorHandle* op = nullptr;
  inline static std::atomic<const OperatorInfo*> inspected{nullptr};

  static const OperatorInfo* info() {
    const Recorder& r = recorder();
    const OperatorInfo* known = inspected.load(std::memory_order_acquire);
    const bool is_current = known != nullptr && has_thread_state() && r.active.load(std::memory_order_relaxed) &&
                            known->epoch.load(std::memory_order_acquire) == r.epoch.load(std::memory_order_relaxed);
    if (is_current) return known;
    known = info_of_call(*op);
    if (known != nullptr) inspected.store(known, std::memory_order_release);
    return known;
  }

  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    const c10::DispatchKeySet below = keys & kBelowMode;
    const OperatorInfo* info = TypedKernel::info();
    if (info == nullptr) return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    const Way way = way_of(*info, keys);
    if (way != Way::call) {
      Passage passage(*info, way);
      return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    }
    Call call(*info);
    if (call.records_accesses()) add_arguments(call, *info, std::index_sequence_for<Arguments...>(), arguments...);
    call.begin();
    if constexpr (std::is_void_v<Result>) {
      Op::redispatch(below, std::forward<Arguments>(arguments)...);
    } else {
      Result result = Op::redispatch(below, std::forward<Arguments>(arguments)...);
      if (call.adds_results())
        record_or_give_up([&] { visit_any(result, [&](const at::Tensor& tensor) { call.add_result(tensor); }); });
      return result;
    }
  }

  static std::optional<c10::RegistrationHandleRAII> register_kernel() {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    const std::optional<c10::OperatorHandle> handle = dispatcher.findSchema({Op::name, Op::overload_name});
    if (!handle || handle->schema().arguments().size() != sizeof...(Arguments)) return std::nullopt;
    if (is_composite(*handle)) return std::nullopt;   // skipped
    if (op == nullptr) op = new c10::OperatorHandle(*handle);
    return dispatcher.registerImpl(handle->operator_name(), kMode,
                                   c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN((&TypedKernel::run))),
                                   std::nullopt, nullptr, "memtrace");
  }
};

// The kernels of one source that is generated when the observer is built: see memtrace/recording/observers/typed_operators.py.
struct TypedKernels {
  using Register = std::optional<c10::RegistrationHandleRAII> (*)();
  explicit TypedKernels(std::vector<Register> kernels);
};

template <typename... Op>
std::vector<TypedKernels::Register> typed_kernels() { return {&TypedKernel<Op>::register_kernel...}; }

}  // namespace memtrace
