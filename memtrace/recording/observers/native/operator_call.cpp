#include "compiled_regions.h"   // first: it includes Python.h
#include "operator_call.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <typeinfo>
#include <utility>

#include "cuda_storages.h"

namespace memtrace {
namespace {

using Node = torch::autograd::Node;

int64_t next_node() { return static_cast<int64_t>(at::sequence_number::peek()); }

// torch exports neither class of node, so they are recognised by their names.
bool is_node(const Node* node, const char* class_name) {
  return node != nullptr && std::strstr(typeid(*node).name(), class_name) != nullptr;
}

// Whether a node is the backward of a user's autograd.Function. No forward operator created it, but it has Python frames
// of its own.
bool is_python_node(const Node* node) { return is_node(node, "PyNode"); }
bool is_accumulate_grad(const Node* node) { return is_node(node, "AccumulateGrad"); }

// A call that runs in an autograd node (or nullptr) and before which `first` was the next node to be created.
OpCall describe_call(const OperatorInfo& info, ThreadState& thread, const Node* node, int64_t first) {
  OpCall call{};
  call.name = info.name;
  call.stack = kNone;
  call.thread = thread.index;
  call.phase = node != nullptr ? Phase::backward : current_phase(thread);
  call.module = thread.modules.empty() ? kNone : thread.modules.back().first;
  call.recompute = call.phase == Phase::backward && thread.modules.size() > thread.modules_outside;
  call.num_nodes = static_cast<uint32_t>(next_node() - first);
  call.sequence_nr = call.num_nodes > 0 ? first : kNone;
  if (call.num_nodes > 0) {
    call.forward_thread = static_cast<uint32_t>(at::RecordFunction::currentThreadId());
    thread.first_node = std::min(thread.first_node, first);
  }
  if (call.phase == Phase::backward && !call.recompute) {
    call.num_nodes = 0;
    call.sequence_nr = node != nullptr ? static_cast<int64_t>(node->sequence_nr()) : kNone;
    call.forward_thread = node != nullptr ? static_cast<uint32_t>(node->thread_id()) : 0;
  } else if (call.phase == Phase::other && call.num_nodes > 0) {
    call.phase = Phase::forward;   // outside all modules, but autograd records it: a loss function
  }
  return call;
}

// Records the autograd nodes of a call that accesses no memory itself: their backward operators may allocate.
void record_nodes(const OperatorInfo& info, ThreadState& thread, int64_t first, int64_t end) {
  if (end <= first) return;
  Recorder& r = recorder();
  OpCall call = describe_call(info, thread, torch::autograd::get_current_node().get(), first);
  if (call.num_nodes == 0) return;
  call.num_nodes = static_cast<uint32_t>(end - first);
  if (r.options.stacks) call.stack = python_stack(true);
  Lock lock(r.mutex);
  r.push(call);
  r.notify_writer_if_due();
}

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

const OperatorInfo* info_of_call(const c10::OperatorHandle& op) {
  if (!recorder().active.load(std::memory_order_relaxed)) {
    enable_thread(false);   // the mode of this thread was still enabled when the recording ended
    return nullptr;
  }
  const OperatorInfo* info = nullptr;
  record_or_give_up([&] {
    thread_state();
    info = &operator_info(op);
  });
  return info;
}

Passage::Passage(const OperatorInfo& info, Way way)
    : info_(info), thread_(thread_state()), way_(way), first_(way == Way::nothing ? kNone : next_node()) {
  if (way == Way::seen_through) outer_ = std::exchange(thread_.first_node, INT64_MAX);
  if (way != Way::seen_through) guard_.emplace(kMode);
}

// What is seen through may have created an autograd node before its operators: Python handlers run below autograd.
Passage::~Passage() {
  if (way_ == Way::view) record_nodes(info_, thread_, first_, next_node());
  if (way_ != Way::seen_through) return;
  record_nodes(info_, thread_, first_, std::min(next_node(), thread_.first_node));
  thread_.first_node = std::min(outer_, thread_.first_node);
}

Call::Call(const OperatorInfo& info) : info_(info), thread_(thread_state()) {
  Recorder& r = recorder();
  outer_op_ = thread_.current_op;
  op_ = r.next_op.fetch_add(1, std::memory_order_relaxed);
  thread_.current_op = op_;
  thread_.op_blocks.clear();
  thread_.op_allocated_bytes = 0;
  thread_.op_freed = false;
  sequence_ = next_node();
  if (r.cuda_source.load(std::memory_order_relaxed) == CudaSource::history) num_exceptions_ = std::uncaught_exceptions();
}

void Call::add_argument(const at::Tensor& tensor, bool reads, bool writes) {
  if (!tensor.defined()) return;
  const std::optional<Memory> memory = memory_of(tensor);
  if (!memory) return;
  for (Access& access : accesses_) {
    if (access.memory.address == memory->address) {
      access.reads |= reads;
      access.writes |= writes;
      return;
    }
  }
  accesses_.push_back({*memory, reads, writes});
}

void Call::begin() {
  Recorder& r = recorder();
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

Call::~Call() {
  Recorder& r = recorder();
  const int64_t end = r.now();
  if (ticket_ != kNotTimed) end_device_time(ticket_, op_, device_);
  thread_.current_op = outer_op_;
  const auto node = torch::autograd::get_current_node();
  OpCall call = describe_call(info_, thread_, node.get(), sequence_);
  call.op = op_;
  call.start_ns = start_;
  call.duration_ns = end - start_;
  // A failed allocation needs the stack too; torch's history reports it only later.
  const bool failed = r.cuda_source.load(std::memory_order_relaxed) == CudaSource::history &&
                      std::uncaught_exceptions() > num_exceptions_;
  call.has_accesses = !accesses_.empty() || thread_.op_allocated_bytes > 0 || thread_.op_freed || failed;
  if (call.phase == Phase::forward) {
    if (thread_.forward_start == kNone) thread_.forward_start = start_;
    thread_.forward_end = end;
  }
  const bool allocates =
      failed || (thread_.op_allocated_bytes > 0 && thread_.op_allocated_bytes >= r.options.stack_min_bytes);
  const bool is_generated = attribute_to_region(call, true);
  // A call that creates nodes gets a stack even if it allocates nothing: its backward operators inherit that stack.
  if (r.options.stacks && (is_generated || allocates || call.num_nodes > 0)) {
    const bool inherits = call.phase == Phase::backward && !call.recompute && call.sequence_nr >= 0;
    if (is_generated || !inherits || is_python_node(node.get())) call.stack = python_stack(true);
  }
  bool is_full;
  {
    Lock lock(r.mutex);
    if (r.options.accesses) push_writes(r, end);
    if (info_.reduces_over_ranks && is_accumulate_grad(node.get())) label_buckets(r, end);
    if (call.has_accesses || call.num_nodes > 0) r.push(call);
    r.notify_writer_if_due();
    is_full = r.events.size() + r.ops.size() > r.options.limit_records;
  }
  thread_.op_blocks.clear();
  // After the call is in the buffer: a drain finds it there or here.
  std::atomic_ref(thread_.op_start_ns).store(kNone, std::memory_order_relaxed);
  if (is_full) wait_for_writer();
}

void Call::add_result(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto address = reinterpret_cast<uint64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().data());
  const bool is_argument = std::any_of(accesses_.begin(), accesses_.end(),
                                       [&](const Access& access) { return access.memory.address == address; });
  if (!is_argument) add_returned_cuda_block(tensor);
}

void Call::start_on_device(int64_t min_bytes) {
  for (const Access& access : accesses_) {
    if (access.memory.device == 0 || access.memory.size < min_bytes) continue;
    device_ = access.memory.device;
    ticket_ = start_device_time(device_);
    return;
  }
}

void Call::push(Recorder& r, const Memory& memory, EventKind kind, int64_t time) {
  r.push(Event{time, memory.address, memory.size, op_, kNone, thread_.index, memory.device, kind,
               memory.origin != Origin::traced});
}

void Call::push_writes(Recorder& r, int64_t end) {
  for (const Access& access : accesses_)
    if (access.writes) push(r, access.memory, EventKind::write, end);
  if (!info_.writes_result) return;
  // The operator wrote the memory that it allocated and did not free.
  for (uint64_t block : thread_.op_blocks) push(r, {block, 0, 0, Origin::traced}, EventKind::write, end);
}

// DistributedDataParallel reduces its flat buffers when the last gradient in them is accumulated.
void Call::label_buckets(Recorder& r, int64_t time) {
  const int32_t name = r.names.id(NameKind::tensor, "gradient bucket");
  for (const Access& access : accesses_)
    r.push(Event{time, access.memory.address, access.memory.size, kGradientCategory, name, thread_.index,
                 access.memory.device, EventKind::label, access.memory.origin != Origin::traced});
}

}  // namespace memtrace
