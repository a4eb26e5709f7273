// Records the events of the CUDA caching allocator: its trace tracker reports every allocation, requested and completed
// free, segment and out-of-memory error. Without the CUDA headers only the conversion of events is built, so that tests
// can use it.
#include "cuda_allocator.h"

#include <algorithm>

#include "cpu_allocator.h"
#include "state.h"

#ifdef MEMTRACE_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace memtrace {

namespace {

int32_t stream_pool_index(StreamPool stream_pool) {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  const auto known = std::find(r.stream_pools.begin(), r.stream_pools.end(), stream_pool);
  const auto index = static_cast<int32_t>(known - r.stream_pools.begin());
  if (known == r.stream_pools.end()) r.stream_pools.push_back(stream_pool);
  return index;
}

}  // namespace

void record_cuda_event(const CudaEvent& event) {
  Recorder& r = recorder();
  if (!r.active.load(std::memory_order_relaxed)) return;
  const auto device = static_cast<int8_t>(event.device + 1);
  const int32_t stream_pool = stream_pool_index({event.stream, event.pool});
  const bool happens_now = event.time_ns == kNone;
  if (event.kind == EventKind::alloc && happens_now) {
    if (!thread_enabled()) enable_thread(true);
    record_allocation(event.address, event.size, device, stream_pool);
    return;
  }
  ThreadState& thread = thread_state();
  // Count the failed allocation, so that its operator gets a stack.
  if (event.kind == EventKind::oom) thread.op_allocated_bytes += event.size;
  const bool is_older = event.kind == EventKind::baseline || event.kind == EventKind::older_segment;
  r.add(Event{happens_now ? r.now() : event.time_ns, event.address, event.size,
              is_older ? event.extra : happens_now ? thread.current_op : kNone, stream_pool,
              happens_now ? thread.index : static_cast<int16_t>(kNone), device, event.kind, false});
}

#ifdef MEMTRACE_CUDA

namespace {

using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;

EventKind kind_of(Entry::Action action) {
  switch (action) {
    case Entry::ALLOC: return EventKind::alloc;
    case Entry::FREE_REQUESTED: return EventKind::free_requested;
    case Entry::FREE_COMPLETED: return EventKind::free;
    case Entry::SEGMENT_ALLOC: return EventKind::segment_alloc;
    case Entry::SEGMENT_FREE: return EventKind::segment_free;
    case Entry::SEGMENT_MAP: return EventKind::segment_map;
    case Entry::SEGMENT_UNMAP: return EventKind::segment_unmap;
    case Entry::OOM: return EventKind::oom;
    default: return EventKind::snapshot;
  }
}

// The pool number of memtrace.format.schema: 2k for torch's pool (0, k), 2k + 1 for (k, 0), such as that of a CUDA graph.
template <typename AnyEntry>
int64_t pool_of(const AnyEntry& entry) {
  if constexpr (requires { entry.mempool_; }) {
    const auto& [capture, user] = entry.mempool_;
    return static_cast<int64_t>(capture != 0 ? 2 * capture + 1 : 2 * user);
  } else {
    return kNone;
  }
}

// Called while the allocator holds its lock: must neither allocate on the device nor wait for the GIL.
void on_entry(const Entry& entry) {
  record_or_give_up([&] {
    record_cuda_event({kind_of(entry.action_), entry.device_, entry.action_ == Entry::SNAPSHOT ? 0 : entry.addr_,
                       static_cast<int64_t>(entry.size_), reinterpret_cast<int64_t>(entry.stream_), pool_of(entry)});
  });
}

}  // namespace

bool cuda_supported() { return true; }

void attach_cuda_allocator() {
  static bool attached = false;   // torch cannot detach a tracker; outside recordings it does nothing
  if (attached) return;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_entry);
  attached = true;
}

#else

bool cuda_supported() { return false; }
void attach_cuda_allocator() {}

#endif

}  // namespace memtrace
