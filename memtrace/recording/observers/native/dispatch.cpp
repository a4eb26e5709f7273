// The dispatcher mode: a boxed fallback on a dispatch key that torch reserves for out-of-tree modes. It is enabled per
// thread, sees every operator before autograd does, with its schema and arguments, and redispatches below itself.
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "cuda_storages.h"
#include "device_time.h"
#include "dispatch.h"
#include "operator_info.h"
#include "state.h"

namespace memtrace {
namespace {

// Handlers of these keys call other operators on real tensors, which are recorded instead of the call itself.
constexpr c10::DispatchKeySet kKeysThatCallOperators({
    c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchBatchedDecomposition, c10::DispatchKey::FuncTorchVmapMode,
    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchDynamicLayerBackMode});

struct Access {
  Memory memory;
  bool reads, writes;
};

using Accesses = c10::SmallVector<Access, 16>;

}  // namespace

std::optional<Memory> memory_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage()) return std::nullopt;
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return std::nullopt;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  const c10::Device device = data.device();
  const bool on_cpu = device.is_cpu();
  if (data.get() == nullptr || !(on_cpu || device.is_cuda())) return std::nullopt;
  const int64_t size = storage->sym_nbytes().maybe_as_int().value_or(0);
  if (size == 0) return std::nullopt;
  if (!on_cpu && recorder().cuda_source.load(std::memory_order_relaxed) == CudaSource::undecided) return std::nullopt;
  const Origin origin = watch_memory(storage, data);
  if (origin == Origin::excluded) return std::nullopt;
  return Memory{reinterpret_cast<uint64_t>(data.get()), size, static_cast<int8_t>(on_cpu ? 0 : device.index() + 1), origin};
}

namespace {

void add_access(const at::Tensor& tensor, bool reads, bool writes, Accesses& out) {
  if (!tensor.defined()) return;
  const std::optional<Memory> memory = memory_of(tensor);
  if (!memory) return;
  for (Access& access : out) {
    if (access.memory.address == memory->address) {
      access.reads |= reads;
      access.writes |= writes;
      return;
    }
  }
  out.push_back({*memory, reads, writes});
}

void add_argument_accesses(const OperatorInfo& info, const torch::jit::Stack& stack, Accesses& out) {
  const c10::IValue* arguments = stack.data() + stack.size() - info.num_arguments;
  for (const ArgumentAccess& access : info.accesses) {
    const c10::IValue& value = arguments[access.index];
    if (value.isTensor()) {
      add_access(value.toTensor(), access.reads, access.writes, out);
    } else if (access.is_list && value.isList()) {
      for (const c10::IValue& element : value.toListRef())
        if (element.isTensor()) add_access(element.toTensor(), access.reads, access.writes, out);
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

// torch exports neither class of node, so they are recognised by their names.
bool runs_node(const char* class_name) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const torch::autograd::Node& running = *node;
  return std::strstr(typeid(running).name(), class_name) != nullptr;
}

// Whether the backward of a user's autograd.Function is running. No forward operator created its node, but it has Python
// frames of its own.
bool runs_python_node() { return runs_node("PyNode"); }
bool runs_accumulate_grad() { return runs_node("AccumulateGrad"); }

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
  if (call.num_nodes > 0) {
    call.forward_thread = static_cast<uint32_t>(at::RecordFunction::currentThreadId());
    thread.first_node = std::min(thread.first_node, sequence);
  }
  if (call.phase == Phase::backward && !call.recompute) {
    call.num_nodes = 0;
    call.sequence_nr = node ? static_cast<int64_t>(node->sequence_nr()) : kNone;
    call.forward_thread = node ? static_cast<uint32_t>(node->thread_id()) : 0;
  } else if (call.phase == Phase::other && call.num_nodes > 0) {
    call.phase = Phase::forward;   // outside all modules, but autograd records it: a loss function
  }
  return call;
}

// Records one operator call from its start (constructor) to its end (destructor), even if the operator throws.
class Call {
 public:
  Call(const OperatorInfo& info, const torch::jit::Stack& stack) : info_(info), thread_(thread_state()) {
    Recorder& r = recorder();
    outer_op_ = thread_.current_op;
    op_ = r.next_op++;
    thread_.current_op = op_;
    thread_.op_blocks.clear();
    thread_.op_allocated_bytes = 0;
    thread_.op_freed = false;
    sequence_ = static_cast<int64_t>(at::sequence_number::peek());
    if (r.options.accesses) record_or_give_up([&] { add_argument_accesses(info, stack, accesses_); });
    // Memory whose allocation was not reported counts as allocated here, so that it gets a stack.
    for (const Access& access : accesses_)
      if (begins_at_first_sight(access.memory.origin)) thread_.op_allocated_bytes += access.memory.size;
    start_ = r.now();
    std::atomic_ref(thread_.op_start_ns).store(start_, std::memory_order_relaxed);
    if (r.options.device_time_min_bytes != kNone) start_on_device(r.options.device_time_min_bytes);
    if (accesses_.empty()) return;
    Lock lock(r.mutex);
    for (const Access& access : accesses_)
      if (access.reads) push(r, access.memory, EventKind::read, start_);
    r.notify_writer_if_due();
  }

  ~Call() {
    Recorder& r = recorder();
    const int64_t end = r.now();
    if (ticket_ != kNotTimed) end_device_time(ticket_, op_, device_);
    thread_.current_op = outer_op_;
    OpCall call = describe(end);
    const bool inherits = call.phase == Phase::backward && !call.recompute && call.sequence_nr >= 0;
    // A failed allocation needs the stack too; torch's history reports it only later.
    const bool failed = r.cuda_source == CudaSource::history && std::uncaught_exceptions() > num_exceptions_;
    const bool allocates =
        failed || (thread_.op_allocated_bytes > 0 && thread_.op_allocated_bytes >= r.options.stack_min_bytes);
    call.has_accesses |= failed;
    // A call that creates nodes gets a stack even if it allocates nothing: its backward operators inherit that stack.
    const bool needs_stack = (allocates || call.num_nodes > 0) && !(inherits && !runs_python_node());
    if (r.options.stacks && needs_stack) call.stack = python_stack(true);
    bool is_full;
    {
      Lock lock(r.mutex);
      if (r.options.accesses) push_writes(r, end);
      if (info_.reduces_over_ranks && runs_accumulate_grad()) label_buckets(r, end);
      if (call.has_accesses || call.num_nodes > 0) r.push(call);
      r.notify_writer_if_due();
      is_full = r.events.size() + r.ops.size() > r.options.limit_records;
    }
    thread_.op_blocks.clear();
    // After the call is in the buffer: a drain finds it there or here.
    std::atomic_ref(thread_.op_start_ns).store(kNone, std::memory_order_relaxed);
    if (is_full) wait_for_writer();
  }

  // Adds the blocks that the operator returns, unless the allocator reported them while it ran.
  void add_returned_blocks(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    if (recorder().cuda_source.load(std::memory_order_relaxed) == CudaSource::undecided) return;
    const size_t num_results = std::min(op.schema().returns().size(), stack.size());
    for (size_t i = stack.size() - num_results; i < stack.size(); ++i) {
      if (stack[i].isTensor()) add_returned_block(stack[i].toTensor());
      if (!stack[i].isTensorList()) continue;
      for (const c10::IValue& element : stack[i].toListRef())
        if (element.isTensor()) add_returned_block(element.toTensor());
    }
  }

  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  void add_returned_block(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto address = reinterpret_cast<uint64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
    const bool is_argument = std::any_of(accesses_.begin(), accesses_.end(),
                                         [&](const Access& access) { return access.memory.address == address; });
    if (!is_argument) add_returned_cuda_block(tensor);
  }

  void start_on_device(int64_t min_bytes) {
    for (const Access& access : accesses_) {
      if (access.memory.device == 0 || access.memory.size < min_bytes) continue;
      device_ = access.memory.device;
      ticket_ = start_device_time(device_);
      return;
    }
  }

  OpCall describe(int64_t end) {
    OpCall call = describe_call(info_, thread_, sequence_);
    call.op = op_;
    call.start_ns = start_;
    call.duration_ns = end - start_;
    call.has_accesses = !accesses_.empty() || thread_.op_allocated_bytes > 0 || thread_.op_freed;
    if (call.phase == Phase::forward) {
      if (thread_.forward_start == kNone) thread_.forward_start = start_;
      thread_.forward_end = end;
    }
    return call;
  }

  void push(Recorder& r, const Memory& memory, EventKind kind, int64_t time) {
    r.push(Event{time, memory.address, memory.size, op_, kNone, thread_.index, memory.device, kind,
                 memory.origin != Origin::traced});
  }

  void push_writes(Recorder& r, int64_t end) {
    for (const Access& access : accesses_)
      if (access.writes) push(r, access.memory, EventKind::write, end);
    if (!info_.writes_result) return;
    // The operator wrote the memory that it allocated and did not free.
    for (uint64_t block : thread_.op_blocks) push(r, {block, 0, 0, Origin::traced}, EventKind::write, end);
  }

  // DistributedDataParallel reduces its flat buffers when the last gradient in them is accumulated.
  void label_buckets(Recorder& r, int64_t time) {
    const int32_t name = r.names.id(NameKind::tensor, "gradient bucket");
    for (const Access& access : accesses_)
      r.push(Event{time, access.memory.address, access.memory.size, kGradientCategory, name, thread_.index,
                   access.memory.device, EventKind::label, access.memory.origin != Origin::traced});
  }

  const OperatorInfo& info_;
  ThreadState& thread_;
  Accesses accesses_;
  int64_t outer_op_, op_, start_, sequence_;
  int num_exceptions_ = std::uncaught_exceptions();
  uint64_t ticket_ = kNotTimed;   // of the GPU timing
  int8_t device_ = 0;
};

// Records the autograd nodes of a call that accesses no memory itself: their backward operators may allocate.
void record_nodes(const OperatorInfo& info, int64_t first, int64_t end) {
  if (end <= first) return;
  Recorder& r = recorder();
  OpCall call = describe_call(info, thread_state(), first);
  if (call.num_nodes == 0) return;
  call.num_nodes = static_cast<uint32_t>(end - first);
  if (r.options.stacks) call.stack = python_stack(true);
  Lock lock(r.mutex);
  r.push(call);
  r.notify_writer_if_due();
}

int64_t next_node() { return static_cast<int64_t>(at::sequence_number::peek()); }

void observe_view(const OperatorInfo& info, const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  const int64_t first = next_node();
  op.redispatchBoxed(below, stack);
  record_nodes(info, first, next_node());
}

// Records the operators that a call consists of. The call itself may have created an autograd node before them: Python
// handlers run below autograd.
void see_through(const OperatorInfo& info, const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  ThreadState& thread = thread_state();
  const int64_t first = next_node(), outer = std::exchange(thread.first_node, INT64_MAX);
  op.redispatchBoxed(below, stack);
  record_nodes(info, first, std::min(next_node(), thread.first_node));
  thread.first_node = std::min(outer, thread.first_node);
}

// Whether to record the operators that a call consists of instead of the call itself.
bool sees_through(const OperatorInfo& info, c10::DispatchKeySet keys) {
  return info.composite || keys.has_any(kKeysThatCallOperators) || (info.autocasts_cpu && keys.has(c10::DispatchKey::AutocastCPU)) ||
         (info.autocasts_cuda && keys.has(c10::DispatchKey::AutocastCUDA));
}

void observe(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode);
  if (!recorder().active.load(std::memory_order_relaxed)) {
    enable_thread(false);   // the mode of this thread was still enabled when the recording ended
    return op.redispatchBoxed(below, stack);
  }
  const OperatorInfo* inspected = nullptr;
  record_or_give_up([&] {
    thread_state();
    inspected = &operator_info(op);
  });
  if (inspected == nullptr) return op.redispatchBoxed(below, stack);
  const OperatorInfo& info = *inspected;
  const bool is_seen_through = sees_through(info, keys);
  if (info.role > Role::view && !(info.role == Role::no_access && is_seen_through)) {
    record_or_give_up([&] {
      ThreadState& thread = thread_state();
      if (info.role == Role::range_exit) exit_range(thread);
      if (info.role != Role::range_enter) return;
      const c10::IValue& name = (*stack)[stack->size() - info.num_arguments];
      if (name.isString()) enter_range(name.toStringRef(), thread);
    });
    c10::impl::ExcludeDispatchKeyGuard guard(kMode);
    return op.redispatchBoxed(below, stack);
  }
  if (is_seen_through) return see_through(info, op, below, stack);
  c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  if (info.role == Role::view) return observe_view(info, op, below, stack);
  Call call(info, *stack);
  op.redispatchBoxed(below, stack);
  record_or_give_up([&] { call.add_returned_blocks(op, *stack); });
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
  if (r.options.stacks) call.stack = python_stack(false);
  return call;
}

}  // namespace memtrace
