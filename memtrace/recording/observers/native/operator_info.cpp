#include "operator_info.h"

#include <array>
#include <memory>
#include <unordered_map>

namespace memtrace {
namespace {

// Whether an in-place operator does not read what it overwrites.
bool overwrites(const std::string& name) {
  for (std::string_view prefix : {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_",
                                  "aten::random_", "aten::bernoulli_", "aten::exponential_", "aten::_foreach_copy_",
                                  "aten::_foreach_zero_", "aten::set_", "aten::resize_", "aten::eye_"})
    if (starts_with(name, prefix)) return true;
  return false;
}

Role role_of(const std::string& name) {
  if (starts_with(name, "profiler::_record_function_enter")) return Role::range_enter;
  if (starts_with(name, "profiler::_record_function_exit")) return Role::range_exit;
  for (std::string_view prefix : {"aten::set_data", "aten::requires_grad_", "aten::retain_grad", "aten::record_stream",
                                  "aten::is_", "aten::_has_", "aten::size", "aten::stride", "aten::resize_", "aten::set_"})
    if (starts_with(name, prefix)) return Role::no_access;
  return Role::plain;
}

// Whether the result is a view of an argument, whose memory the operator does not access.
bool makes_view(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::_unsafe_view" || schema.name() == "aten::_reshape_alias") return true;
  for (const c10::Argument& result : schema.returns())
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
  return !schema.returns().empty();
}

bool holds_tensors(const c10::TypePtr& type, bool& is_list) {
  if (type->kind() == c10::TypeKind::OptionalType) return holds_tensors(type->containedType(0), is_list);
  if (type->kind() == c10::TypeKind::ListType) {
    is_list = true;
    return holds_tensors(type->containedType(0), is_list);
  }
  return type->kind() == c10::TypeKind::TensorType;
}

std::unique_ptr<OperatorInfo> inspect(const c10::OperatorHandle& op) {
  auto info = std::make_unique<OperatorInfo>();
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = schema.name();
  info->role = role_of(name);
  if (info->role == Role::plain && makes_view(schema)) info->role = Role::view;
  info->writes_result = !starts_with(name, "aten::empty") && !starts_with(name, "aten::new_empty");
  info->composite = is_composite(op);
  info->reduces_over_ranks = starts_with(name, "c10d::allreduce_") || starts_with(name, "c10d::_reduce_scatter");
  info->autocasts_cpu = op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
  info->autocasts_cuda = op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA);
  info->num_arguments = static_cast<uint16_t>(schema.arguments().size());
  for (uint16_t i = 0; i < info->num_arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    ArgumentAccess access{i, false, false, false};
    if (!holds_tensors(argument.type(), access.is_list)) continue;
    const c10::AliasInfo* alias = argument.alias_info();
    access.writes = alias != nullptr && alias->isWrite();
    // Neither reads nor writes: the result is a view of the argument, and making a view accesses no memory.
    access.reads = alias == nullptr || (access.writes && !argument.is_out() && !overwrites(name));
    if (!access.reads && !access.writes) continue;
    info->accesses.push_back(access);
    if (i >= kMaxTypedArguments) continue;
    info->reads |= uint64_t{access.reads} << i;
    info->writes |= uint64_t{access.writes} << i;
  }
  return info;
}

}  // namespace

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
}

const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  static ForkSafeMutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorInfo>>& all = *new std::remove_reference_t<decltype(all)>;
  struct Slot {
    const c10::FunctionSchema* key = nullptr;
    const OperatorInfo* info = nullptr;
  };
  // A pointer, because a shared library has little space for thread-local variables.
  thread_local std::array<Slot, 512>* slots = nullptr;
  if (slots == nullptr) slots = new std::array<Slot, 512>{};
  Recorder& r = recorder();
  const c10::FunctionSchema* key = &op.schema();
  Slot& slot = (*slots)[(reinterpret_cast<uintptr_t>(key) >> 6) % slots->size()];
  if (slot.key == key && slot.info->epoch.load(std::memory_order_acquire) == r.epoch.load(std::memory_order_relaxed)) return *slot.info;
  std::lock_guard<ForkSafeMutex> lock(mutex);
  std::unique_ptr<OperatorInfo>& info = all[key];
  if (info == nullptr) info = inspect(op);
  if (info->epoch != r.epoch) {
    const std::string& overload = op.schema().overload_name();
    info->name = r.names.id(NameKind::op, overload.empty() ? op.schema().name() : op.schema().name() + "." + overload);
    info->epoch = r.epoch.load();
  }
  slot = {key, info.get()};
  return *info;
}

}  // namespace memtrace
