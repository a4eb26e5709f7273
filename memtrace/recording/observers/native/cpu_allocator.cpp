// Wraps torch's CPU allocator to record every allocation and free.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <stdexcept>

#include "cpu_allocator.h"
#include "dispatch.h"
#include "state.h"

namespace memtrace {
namespace {

// The "address" of an oom event is the free memory of the device; for the CPU it is not known.
constexpr auto kUnknownFree = static_cast<uint64_t>(kNone);

// Storages of foreign memory whose liveness is checked at an allocation. Programs rarely have more.
constexpr size_t kChecksPerAllocation = 8;

c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_deleter = nullptr;

void record_free(uint64_t address) {
  Recorder& r = recorder();
  ThreadState& thread = thread_state();
  r.add(Event{r.now(), address, 0, thread.current_op, kNone, thread.index, 0, EventKind::free, false});
  thread.op_freed = true;
  auto& blocks = thread.op_blocks;
  for (size_t i = blocks.size(); i-- > 0;) {
    if (blocks[i] == address) {
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
}

void traced_deleter(void* data) {
  if (recorder().runs())
    record_or_give_up([&] { record_free(reinterpret_cast<uint64_t>(data)); });
  original_deleter(data);
}

void record_out_of_memory(int64_t size) {
  Recorder& r = recorder();
  ThreadState& thread = thread_state();
  // Count the failed allocation, so that its operator gets a stack.
  thread.op_allocated_bytes += size;
  r.add(Event{r.now(), kUnknownFree, size, thread.current_op, kNone, thread.index, 0, EventKind::oom, false});
  r.wake_writer_now();   // the program may end soon
}

struct TracedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr data = allocate_or_record_oom(size);
    Recorder& r = recorder();
    if (data.get() == nullptr || !r.active.load(std::memory_order_relaxed)) return data;
    trace_deleter(data);
    // The dispatcher mode is thread-local: enable it in every thread that allocates.
    const bool is_enabled = has_thread_state() && thread_state().current_op != kNone;
    if (!is_enabled && !thread_enabled()) enable_thread(true);
    record_or_give_up(
        [&] { record_allocation(reinterpret_cast<uint64_t>(data.get()), static_cast<int64_t>(size), 0, kNone); });
    return data;
  }
  static c10::DataPtr allocate_or_record_oom(size_t size) {
    try {
      return original->allocate(size);
    } catch (...) {
      if (recorder().active.load(std::memory_order_relaxed))
        record_or_give_up([&] { record_out_of_memory(static_cast<int64_t>(size)); });
      throw;
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return traced_deleter; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return original->is_simple_data_ptr(data); }
  void copy_data(void* to, const void* from, size_t size) const override { original->copy_data(to, from, size); }
};

TracedAllocator* traced() {
  static auto* instance = new TracedAllocator;  // never destroyed: storages keep pointers to it
  return instance;
}

}  // namespace

bool trace_deleter(c10::DataPtr& data) {
  return data.get_deleter() == traced_deleter ||
         (data.get() == data.get_context() && data.compare_exchange_deleter(original_deleter, traced_deleter));
}

bool has_traced_deleter(const c10::DataPtr& data) { return data.get_deleter() == traced_deleter; }

void record_allocation(uint64_t address, int64_t size, int8_t device, int32_t stream) {
  Recorder& r = recorder();
  ThreadState& thread = thread_state();
  const bool in_operator = thread.current_op != kNone;
  record_foreign_frees(kChecksPerAllocation);   // before the allocation, so that a peak contains no freed memory
  if (in_operator) {
    thread.op_blocks.push_back(address);
    thread.op_allocated_bytes += size;
  }
  if (in_operator || size < r.options.stack_min_bytes) {
    r.add(Event{r.now(), address, size, thread.current_op, stream, thread.index, device, EventKind::alloc, false});
    return;
  }
  // Outside all operators: a storage resized from Python, a compiled kernel.
  const OpCall call = unnamed_call(thread);
  Lock lock(r.mutex);
  r.push(call);
  r.push(Event{call.start_ns, address, size, call.op, stream, thread.index, device, EventKind::alloc, false});
  r.notify_writer_if_due();
}

void install_cpu_allocator(bool on) {
  if (on) {
    c10::Allocator* current = c10::GetCPUAllocator();
    if (current == traced()) return;
    if (current->raw_deleter() == nullptr)
      throw std::runtime_error("the CPU allocator cannot be wrapped: it has no raw deleter");
    if (original != nullptr && current->raw_deleter() != original_deleter)
      throw std::runtime_error("the CPU allocator was replaced since the last recording");
    original = current;
    original_deleter = current->raw_deleter();
    c10::SetCPUAllocator(traced());
    if (c10::GetCPUAllocator() != traced())
      throw std::runtime_error("the CPU allocator cannot be wrapped: another library set one with a higher priority");
  } else if (original != nullptr && c10::GetCPUAllocator() == traced()) {
    c10::SetCPUAllocator(original);
  }
}

}  // namespace memtrace
