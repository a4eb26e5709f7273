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

int32_t stream_index(int64_t stream) {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  const auto found = std::find(r.streams.begin(), r.streams.end(), stream);
  if (found == r.streams.end()) r.streams.push_back(stream);
  return static_cast<int32_t>(std::find(r.streams.begin(), r.streams.end(), stream) - r.streams.begin());
}

}  // namespace

void record_cuda_event(const CudaEvent& event) {
  Recorder& r = recorder();
  if (!r.active.load(std::memory_order_relaxed)) return;
  if (event.kind == EventKind::alloc) {
    if (!thread_enabled()) enable_thread(true);
    record_allocation(event.address, event.size, static_cast<int8_t>(event.device + 1), stream_index(event.stream));
    return;
  }
  ThreadState& thread = thread_state();
  r.add(Event{r.now(), event.address, event.size, thread.current_op, stream_index(event.stream), thread.index,
              static_cast<int8_t>(event.device + 1), event.kind, false});
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

// Called with the allocator's lock held: it must neither allocate on the device nor wait for the GIL.
void on_entry(const Entry& entry) {
  const bool has_address = entry.action_ != Entry::OOM && entry.action_ != Entry::SNAPSHOT;
  record_cuda_event({kind_of(entry.action_), entry.device_, has_address ? entry.addr_ : 0,
                     static_cast<int64_t>(entry.size_), reinterpret_cast<int64_t>(entry.stream_)});
}

}  // namespace

bool cuda_supported() { return true; }

void install_cuda_allocator() {
  static bool attached = false;   // torch has no way to detach a tracker: it stays, inert
  if (attached) return;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_entry);
  attached = true;
}

#else

bool cuda_supported() { return false; }
void install_cuda_allocator() {}

#endif

}  // namespace memtrace
