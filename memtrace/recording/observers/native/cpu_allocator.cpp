// The CPU allocator of torch, wrapped: it delegates, and tells the recorder of every allocation and free.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <stdexcept>

#include "cpu_allocator.h"
#include "state.h"

namespace memtrace {
namespace {

// As CUDA's events of failed allocations have it: here nobody says how much the machine had left.
constexpr auto kUnknownFree = static_cast<uint64_t>(kNone);

c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_delete = nullptr;

void delete_traced(void* data) {
  Recorder& r = recorder();
  if (r.active.load(std::memory_order_relaxed)) {
    ThreadState& thread = thread_state();
    const auto address = reinterpret_cast<uint64_t>(data);
    r.add(Event{r.now(), address, 0, thread.current_op, kNone, thread.index, 0, EventKind::free, false});
    auto& mine = thread.op_blocks;
    for (size_t i = mine.size(); i-- > 0;) {
      if (mine[i] == address) {
        mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
  }
  original_delete(data);
}

struct TracedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr data = allocate_or_tell(size);
    Recorder& r = recorder();
    if (data.get() == nullptr || !r.active.load(std::memory_order_relaxed)) return data;
    adopt_deleter(data);
    // Any thread that allocates is a thread whose operators are to be seen: the mode is thread-local.
    if (!thread_enabled()) enable_thread(true);
    record_allocation(reinterpret_cast<uint64_t>(data.get()), static_cast<int64_t>(size), 0, kNone);
    return data;
  }
  static c10::DataPtr allocate_or_tell(size_t size) {
    try {
      return original->allocate(size);
    } catch (...) {
      Recorder& r = recorder();
      if (r.active.load(std::memory_order_relaxed)) {
        ThreadState& thread = thread_state();
        // What fails would have allocated: its operator gets a stack for it.
        thread.op_allocated_bytes += static_cast<int64_t>(size);
        r.add(Event{r.now(), kUnknownFree, static_cast<int64_t>(size), thread.current_op, kNone, thread.index, 0,
                    EventKind::oom, false});
      }
      throw;
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return delete_traced; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return original->is_simple_data_ptr(data); }
  void copy_data(void* to, const void* from, size_t size) const override { original->copy_data(to, from, size); }
};

TracedAllocator* traced() {
  static auto* instance = new TracedAllocator;  // storages keep a pointer to it for ever
  return instance;
}

}  // namespace

bool adopt_deleter(c10::DataPtr& data) {
  return data.get_deleter() == delete_traced ||
         (data.get() == data.get_context() && data.compare_exchange_deleter(original_delete, delete_traced));
}

bool has_traced_deleter(const c10::DataPtr& data) { return data.get_deleter() == delete_traced; }

void record_allocation(uint64_t address, int64_t size, int8_t device, int32_t stream) {
  Recorder& r = recorder();
  ThreadState& thread = thread_state();
  const bool in_operator = thread.current_op != kNone;
  if (in_operator) {
    thread.op_blocks.push_back(address);
    thread.op_allocated_bytes += size;
  }
  if (in_operator || size < r.options.stack_min_bytes) {
    r.add(Event{r.now(), address, size, thread.current_op, stream, thread.index, device, EventKind::alloc, false});
    return;
  }
  // Outside every operator (a storage resized from Python, a compiled kernel): a call of no name carries the stack.
  OpCall call{};
  call.op = r.next_op++;
  call.start_ns = r.now();
  call.sequence_nr = call.name = call.stack = kNone;
  call.module = thread.modules.empty() ? kNone : thread.modules.back().first;
  call.thread = thread.index;
  call.phase = current_phase(thread);
  call.touched_blocks = true;
  if (r.options.stacks) call.stack = python_stack(false);
  Lock lock(r.mutex);
  r.ops.push_back(call);
  r.events.push_back(Event{call.start_ns, address, size, call.op, stream, thread.index, device, EventKind::alloc, false});
  r.notify_if_due();
}

void install_cpu_allocator(bool on) {
  if (on) {
    c10::Allocator* now = c10::GetCPUAllocator();
    if (now == traced()) return;
    if (now->raw_deleter() == nullptr) throw std::runtime_error("the CPU allocator in use has no plain deleter to wrap");
    if (original != nullptr && now->raw_deleter() != original_delete)
      throw std::runtime_error("the CPU allocator was replaced since the last recording");
    original = now;
    original_delete = now->raw_deleter();
    c10::SetCPUAllocator(traced());
    if (c10::GetCPUAllocator() != traced()) throw std::runtime_error("another library holds the CPU allocator with a higher priority");
  } else if (original != nullptr && c10::GetCPUAllocator() == traced()) {
    c10::SetCPUAllocator(original);
  }
}

}  // namespace memtrace
