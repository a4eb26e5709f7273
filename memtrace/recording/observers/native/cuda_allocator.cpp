// The CUDA caching allocator, behind the same records as the CPU's: its trace tracker tells of every allocation,
// requested and completed free, segment and OOM. Without CUDA's headers only the conversion is built, so that it can
// be tested with hand-made entries.
#include "cuda_allocator.h"

#include <algorithm>

#include "cpu_allocator.h"
#include "state.h"

#ifdef MEMTRACE_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace memtrace {

namespace {

int32_t place_index(Place place) {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  const auto found = std::find(r.places.begin(), r.places.end(), place);
  const auto index = static_cast<int32_t>(found - r.places.begin());
  if (found == r.places.end()) r.places.push_back(place);
  return index;
}

}  // namespace

void record_cuda_event(const CudaEvent& event) {
  Recorder& r = recorder();
  if (!r.active.load(std::memory_order_relaxed)) return;
  const auto device = static_cast<int8_t>(event.device + 1);
  const int32_t place = place_index({event.stream, event.pool});
  const bool happens_now = event.time_ns == kNone;
  if (event.kind == EventKind::alloc && happens_now) {
    if (!thread_enabled()) enable_thread(true);
    record_allocation(event.address, event.size, device, place);
    return;
  }
  ThreadState& thread = thread_state();
  // What fails would have allocated: its operator gets a stack for it.
  if (event.kind == EventKind::oom) thread.op_allocated_bytes += event.size;
  const bool is_older = event.kind == EventKind::baseline || event.kind == EventKind::older_segment;
  r.add(Event{happens_now ? r.now() : event.time_ns, event.address, event.size,
              is_older ? event.extra : happens_now ? thread.current_op : kNone, place,
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

// As memtrace.format.schema numbers pools: 2k for torch's (0, k), 2k + 1 for (k, 0) as of a CUDA graph.
template <typename AnyEntry>
int64_t pool_of(const AnyEntry& entry) {
  if constexpr (requires { entry.mempool_; }) {
    const auto& [capture, user] = entry.mempool_;
    return static_cast<int64_t>(capture != 0 ? 2 * capture + 1 : 2 * user);
  } else {
    return kNone;
  }
}

// Called with the allocator's lock held: it must neither allocate on the device nor wait for the GIL.
void on_entry(const Entry& entry) {
  record_cuda_event({kind_of(entry.action_), entry.device_, entry.action_ == Entry::SNAPSHOT ? 0 : entry.addr_,
                     static_cast<int64_t>(entry.size_), reinterpret_cast<int64_t>(entry.stream_), pool_of(entry)});
}

}  // namespace

bool cuda_supported() { return true; }

void attach_cuda_allocator() {
  static bool attached = false;   // torch has no way to detach a tracker: it stays, inert
  if (attached) return;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_entry);
  attached = true;
}

#else

bool cuda_supported() { return false; }
void attach_cuda_allocator() {}

#endif

}  // namespace memtrace
