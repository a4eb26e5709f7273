// The dispatcher mode: a boxed fallback on a dispatch key that torch keeps for modes made out of tree. Switched on per
// thread, it sees every operator before autograd does, with its schema and arguments, and calls on below itself.
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <typeinfo>

#include "cpu_allocator.h"
#include "device_time.h"
#include "dispatch.h"
#include "state.h"

namespace memtrace {
namespace {

constexpr c10::DispatchKey kMode = c10::DispatchKey::DeferredInit;

// Where one of these handles the call, it calls other operators on real tensors: those are what we want to see.
constexpr c10::DispatchKeySet kCallsOthers({
    c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchBatchedDecomposition, c10::DispatchKey::FuncTorchVmapMode,
    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchDynamicLayerBackMode});

enum class Role : uint8_t { plain, view, range_enter, range_exit, untouched };

struct ArgumentUse {
  uint16_t index;
  bool is_list, reads, writes;
};

// What the schema says of an operator, worked out once.
struct OperatorInfo {
  int32_t name = kNone;
  uint32_t epoch = 0;
  Role role = Role::plain;
  bool writes_result = true;      // false: the result is memory without content (empty)
  bool composite = false;         // written in terms of other operators
  bool autocasts_cpu = false, autocasts_cuda = false;
  uint16_t num_arguments = 0;
  std::vector<ArgumentUse> uses;
};

bool starts_with(const std::string& text, std::string_view prefix) { return text.rfind(prefix, 0) == 0; }

// In-place operators that do not look at what they overwrite.
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
    if (starts_with(name, prefix)) return Role::untouched;
  return Role::plain;
}

// Its result looks at its argument's memory, which it does not touch.
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
  info->composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                    !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
                    !op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
  info->autocasts_cpu = op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
  info->autocasts_cuda = op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA);
  info->num_arguments = static_cast<uint16_t>(schema.arguments().size());
  for (uint16_t i = 0; i < info->num_arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    ArgumentUse use{i, false, false, false};
    if (!holds_tensors(argument.type(), use.is_list)) continue;
    const c10::AliasInfo* alias = argument.alias_info();
    use.writes = alias != nullptr && alias->isWrite();
    // Neither: the result is a view of the argument, and making a view touches no memory.
    use.reads = alias == nullptr || (use.writes && !argument.is_out() && !overwrites(name));
    if (use.reads || use.writes) info->uses.push_back(use);
  }
  return info;
}

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorInfo>>& all = *new std::remove_reference_t<decltype(all)>;
  struct Slot {
    const c10::FunctionSchema* key = nullptr;
    const OperatorInfo* info = nullptr;
  };
  // By pointer: what a shared library keeps in thread-local storage itself should be small.
  thread_local std::array<Slot, 512>* near_slots = nullptr;
  if (near_slots == nullptr) near_slots = new std::array<Slot, 512>{};
  std::array<Slot, 512>& near = *near_slots;
  Recorder& r = recorder();
  const c10::FunctionSchema* key = &op.schema();
  Slot& slot = near[(reinterpret_cast<uintptr_t>(key) >> 6) % near.size()];
  if (slot.key == key && slot.info->epoch == r.epoch.load(std::memory_order_relaxed)) return *slot.info;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<OperatorInfo>& info = all[key];
  if (info == nullptr) info = inspect(op);
  if (info->epoch != r.epoch) {
    const std::string& overload = op.schema().overload_name();
    info->name = r.names.id(NameKind::op, overload.empty() ? op.schema().name() : op.schema().name() + "." + overload);
    info->epoch = r.epoch;
  }
  slot = {key, info.get()};
  return *info;
}

// Memory that no traced allocator gave out has no free to see: a weak reference tells when it is gone.
struct Foreign {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t address;
};
std::mutex foreign_mutex;
auto& foreign_blocks = *new std::unordered_map<c10::StorageImpl*, Foreign>;

bool watch_foreign(c10::StorageImpl* storage, c10::DataPtr& data) {
  if (has_traced_deleter(data)) return false;
  if (adopt_deleter(data)) return false;
  std::lock_guard<std::mutex> lock(foreign_mutex);
  if (foreign_blocks.count(storage) == 0) {
    auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    foreign_blocks.emplace(storage, Foreign{c10::weak_intrusive_ptr<c10::StorageImpl>(strong),
                                            reinterpret_cast<uint64_t>(data.get())});
  }
  return true;
}

struct Access {
  uint64_t address;
  int64_t size;
  int8_t device;
  bool reads, writes, foreign;
};

using Accesses = c10::SmallVector<Access, 16>;

void collect(const at::Tensor& tensor, bool reads, bool writes, Accesses& out) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return;
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  const c10::Device device = data.device();
  const bool on_cpu = device.is_cpu();
  if (data.get() == nullptr || !(on_cpu || device.is_cuda())) return;
  const auto address = reinterpret_cast<uint64_t>(data.get());
  for (Access& seen : out) {
    if (seen.address == address) {
      seen.reads |= reads;
      seen.writes |= writes;
      return;
    }
  }
  const bool foreign = on_cpu && watch_foreign(storage, data);
  const int64_t size = storage->sym_nbytes().maybe_as_int().value_or(0);
  if (size == 0) return;
  out.push_back({address, size, static_cast<int8_t>(on_cpu ? 0 : device.index() + 1), reads, writes, foreign});
}

void collect_arguments(const OperatorInfo& info, const torch::jit::Stack& stack, Accesses& out) {
  const c10::IValue* arguments = stack.data() + stack.size() - info.num_arguments;
  for (const ArgumentUse& use : info.uses) {
    const c10::IValue& value = arguments[use.index];
    if (value.isTensor()) {
      collect(value.toTensor(), use.reads, use.writes, out);
    } else if (use.is_list && value.isList()) {
      for (const c10::IValue& element : value.toListRef())
        if (element.isTensor()) collect(element.toTensor(), use.reads, use.writes, out);
    }
  }
}

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

void exit_range(ThreadState& thread) {
  if (thread.ranges.empty()) return;   // entered before the recording
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

// A user's autograd Function: no forward operator made its node, but its backward has Python frames of its own.
bool runs_python_node() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const torch::autograd::Node& running = *node;
  return std::strstr(typeid(running).name(), "PyNode") != nullptr;   // torch does not export the class itself
}

OpCall describe_call(const OperatorInfo& info, ThreadState& thread, int64_t sequence) {
  OpCall call{};
  call.name = info.name;
  call.stack = kNone;
  call.thread = thread.index;
  const auto node = torch::autograd::get_current_node();
  call.phase = node ? Phase::backward : current_phase(thread);
  call.module = thread.modules.empty() ? kNone : thread.modules.back().first;
  call.recompute = call.phase == Phase::backward && thread.modules.size() > thread.modules_outside;
  call.num_nodes = static_cast<uint32_t>(static_cast<int64_t>(at::sequence_number::peek()) - sequence);
  call.sequence_nr = call.num_nodes > 0 ? sequence : kNone;
  if (call.num_nodes > 0) call.forward_thread = static_cast<uint32_t>(at::RecordFunction::currentThreadId());
  if (call.phase == Phase::backward && !call.recompute) {
    call.num_nodes = 0;
    call.sequence_nr = node ? static_cast<int64_t>(node->sequence_nr()) : kNone;
    call.forward_thread = node ? static_cast<uint32_t>(node->thread_id()) : 0;
  } else if (call.phase == Phase::other && call.num_nodes > 0) {
    call.phase = Phase::forward;   // a loss outside every module: autograd records it
  }
  return call;
}

// One operator call from its start to its end, also when it throws.
class Call {
 public:
  Call(const OperatorInfo& info, const torch::jit::Stack& stack) : info_(info), thread_(thread_state()) {
    Recorder& r = recorder();
    outer_op_ = thread_.current_op;
    op_ = r.next_op++;
    thread_.current_op = op_;
    thread_.op_blocks.clear();
    thread_.op_allocated_bytes = 0;
    sequence_ = static_cast<int64_t>(at::sequence_number::peek());
    if (r.options.accesses) collect_arguments(info, stack, accesses_);
    start_ = r.now();
    if (r.options.device_time_min_bytes != kNone) start_on_device(r.options.device_time_min_bytes);
    if (accesses_.empty()) return;
    Lock lock(r.mutex);
    for (const Access& access : accesses_)
      if (access.reads) push(r, access.address, access.size, EventKind::read, access.device, start_, access.foreign);
    r.notify_if_due();
  }

  ~Call() {
    Recorder& r = recorder();
    const int64_t end = r.now();
    if (ticket_ != kNotTimed) end_device_time(ticket_, op_, device_);
    thread_.current_op = outer_op_;
    OpCall call = describe(end);
    const bool inherits = call.phase == Phase::backward && !call.recompute && call.sequence_nr >= 0;
    // A view allocates nothing, but its backward operator may: it inherits the stack of the call that made the node.
    const bool allocates = thread_.op_allocated_bytes > 0 && thread_.op_allocated_bytes >= r.options.stack_min_bytes;
    if (r.options.stacks && (allocates || call.num_nodes > 0) && !(inherits && !runs_python_node())) call.stack = python_stack(true);
    bool full;
    {
      Lock lock(r.mutex);
      if (r.options.accesses) push_writes(r, end);
      if (call.touched_blocks || call.num_nodes > 0) r.ops.push_back(call);
      r.notify_if_due();
      full = r.events.size() + r.ops.size() > r.options.limit_records;
    }
    thread_.op_blocks.clear();
    if (full) wait_for_writer();
  }

  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  void start_on_device(int64_t min_bytes) {
    for (const Access& access : accesses_) {
      if (access.device == 0 || access.size < min_bytes) continue;
      device_ = access.device;
      ticket_ = start_device_time(device_);
      return;
    }
  }

  OpCall describe(int64_t end) {
    OpCall call = describe_call(info_, thread_, sequence_);
    call.op = op_;
    call.start_ns = start_;
    call.duration_ns = end - start_;
    call.touched_blocks = !accesses_.empty() || thread_.op_allocated_bytes > 0;
    if (call.phase == Phase::forward) {
      if (thread_.forward_start == kNone) thread_.forward_start = start_;
      thread_.forward_end = end;
    }
    return call;
  }

  void push(Recorder& r, uint64_t address, int64_t size, EventKind kind, int8_t device, int64_t time, bool foreign) {
    r.events.push_back(Event{time, address, size, op_, kNone, thread_.index, device, kind, foreign});
  }

  void push_writes(Recorder& r, int64_t end) {
    for (const Access& access : accesses_)
      if (access.writes) push(r, access.address, access.size, EventKind::write, access.device, end, access.foreign);
    if (!info_.writes_result) return;
    // What the operator allocated and did not free it wrote.
    for (uint64_t block : thread_.op_blocks) push(r, block, 0, EventKind::write, 0, end, false);
  }

  const OperatorInfo& info_;
  ThreadState& thread_;
  Accesses accesses_;
  int64_t outer_op_, op_, start_, sequence_;
  uint64_t ticket_ = kNotTimed;   // of the time on the device
  int8_t device_ = 0;
};

// A view touches no memory; what matters is the autograd node it may make, whose backward may allocate.
void observe_view(const OperatorInfo& info, const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  const auto sequence = static_cast<int64_t>(at::sequence_number::peek());
  op.redispatchBoxed(below, stack);
  if (static_cast<int64_t>(at::sequence_number::peek()) == sequence) return;
  Recorder& r = recorder();
  OpCall call = describe_call(info, thread_state(), sequence);
  if (call.num_nodes == 0) return;
  if (r.options.stacks) call.stack = python_stack(true);
  Lock lock(r.mutex);
  r.ops.push_back(call);
  r.notify_if_due();
}

bool sees_through(const OperatorInfo& info, c10::DispatchKeySet keys) {
  return info.composite || keys.has_any(kCallsOthers) || (info.autocasts_cpu && keys.has(c10::DispatchKey::AutocastCPU)) ||
         (info.autocasts_cuda && keys.has(c10::DispatchKey::AutocastCUDA));
}

void observe(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode);
  if (!recorder().active.load(std::memory_order_relaxed)) {
    enable_thread(false);   // this thread was still switched on when the recording ended
    return op.redispatchBoxed(below, stack);
  }
  const OperatorInfo& info = info_of(op);
  if (info.role > Role::view) {
    ThreadState& thread = thread_state();
    if (info.role == Role::range_exit) exit_range(thread);
    if (info.role == Role::range_enter) {
      const c10::IValue& name = (*stack)[stack->size() - info.num_arguments];
      if (name.isString()) enter_range(name.toStringRef(), thread);
    }
    c10::impl::ExcludeDispatchKeyGuard guard(kMode);
    return op.redispatchBoxed(below, stack);
  }
  if (sees_through(info, keys)) return op.redispatchBoxed(below, stack);
  c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  if (info.role == Role::view) return observe_view(info, op, below, stack);
  Call call(info, *stack);
  op.redispatchBoxed(below, stack);
}

}  // namespace

void install_dispatch_mode() {
  static c10::RegistrationHandleRAII* held = nullptr;
  if (held != nullptr) return;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(kMode))
    throw std::runtime_error("another library holds the dispatch key DeferredInit");
  // Kept for the life of the process: a thread may still have the key switched on when a recording ends.
  held = new c10::RegistrationHandleRAII(
      dispatcher.registerFallback(kMode, c10::KernelFunction::makeFromBoxedFunction<&observe>(), "memtrace"));
}

void enable_thread(bool on) { c10::impl::tls_set_dispatch_key_included(kMode, on); }
bool thread_enabled() { return c10::impl::tls_is_dispatch_key_included(kMode); }

void release_foreign() {
  Recorder& r = recorder();
  std::lock_guard<std::mutex> lock(foreign_mutex);
  for (auto it = foreign_blocks.begin(); it != foreign_blocks.end();) {
    if (!r.active || it->second.storage.expired()) {
      if (r.active)
        r.add(Event{r.now(), it->second.address, 0, kNone, kNone, kNone, 0, EventKind::free, true});
      it = foreign_blocks.erase(it);
    } else {
      ++it;
    }
  }
}

bool describe_storage(const at::Tensor& tensor, Event& event) {
  Accesses found;
  collect(tensor, false, false, found);
  if (found.empty()) return false;
  event.address = found[0].address;
  event.size = found[0].size;
  event.device = found[0].device;
  event.foreign = found[0].foreign;
  return true;
}

}  // namespace memtrace
