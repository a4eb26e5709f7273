// Records the events of the CUDA caching allocator: its trace tracker reports every allocation, requested and completed
// free, segment and out-of-memory error. Without the CUDA headers only the conversion of events is built, so that tests
// can use it.
#include "cuda_allocator.h"

#include <algorithm>

#include "cpu_allocator.h"
#include "cuda_storages.h"
#include "pause.h"
#include "state.h"

#ifdef MEMTRACE_CUDA
#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
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

Event make_event(const CudaEvent& event, const ThreadState& thread) {
  const bool happens_now = event.time_ns == kNone;
  const bool is_older = event.kind == EventKind::baseline || event.kind == EventKind::older_segment || event.kind == EventKind::found;
  return Event{happens_now ? recorder().now() : event.time_ns, event.address, event.size,
               is_older ? event.extra : happens_now ? thread.current_op : kNone,
               stream_pool_index({event.stream, event.pool}), happens_now ? thread.index : static_cast<int16_t>(kNone),
               static_cast<int8_t>(event.device + 1), event.kind, false};
}

// Inserts what the snapshot contains where it was taken. Requires the mutex.
void insert_before_later_events(const std::vector<Event>& existing) {
  Recorder& r = recorder();
  CudaAttachment& attachment = r.cuda_attachment;
  const bool has_snapshot = attachment.in_progress && attachment.has_snapshot.any();
  const size_t position = has_snapshot ? attachment.position : r.events.size();
  attachment.in_progress = false;
  r.knows_cuda_blocks = false;   // during a pause, these blocks are known from now on
  if (!r.runs()) return;
  r.events.insert(r.events.begin() + static_cast<std::ptrdiff_t>(position), existing.begin(), existing.end());
}

}  // namespace

void record_cuda_event(const CudaEvent& event) {
  Recorder& r = recorder();
  if (!r.runs()) return;
  const bool happens_now = event.time_ns == kNone;
  if (event.kind == EventKind::alloc && happens_now) {
    if (!thread_enabled()) enable_thread(true);
    record_allocation(event.address, event.size, static_cast<int8_t>(event.device + 1),
                      stream_pool_index({event.stream, event.pool}));
    return;
  }
  ThreadState& thread = thread_state();
  // Count the failed allocation, so that its operator gets a stack.
  if (event.kind == EventKind::oom) thread.op_allocated_bytes += event.size;
  r.add(make_event(event, thread));
  if (event.kind == EventKind::oom) r.wake_writer_now();   // the program may end soon
}

void finish_cuda_attachment(const std::vector<CudaEvent>& existing, CudaSource source) {
  Recorder& r = recorder();
  std::vector<Event> events;
  events.reserve(existing.size());
  for (const CudaEvent& event : existing) events.push_back(make_event(event, thread_state()));
  if (source == CudaSource::events && !r.cuda_attachment.in_progress) source = CudaSource::history;
  prepare_cuda_source(source);
  Lock lock(r.mutex);
  insert_before_later_events(events);
  r.cuda_source = source;
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

// During a pause: segments and failed allocations, and the frees of the blocks that are known.
void on_entry_during_pause(const Entry& entry) {
  const EventKind kind = kind_of(entry.action_);
  if (kind == EventKind::free) return record_known_cuda_free(entry.addr_, static_cast<int8_t>(entry.device_ + 1));
  if (kind == EventKind::alloc || kind == EventKind::free_requested || kind == EventKind::snapshot) return;
  record_cuda_event({kind, entry.device_, entry.addr_, static_cast<int64_t>(entry.size_),
                     reinterpret_cast<int64_t>(entry.stream_), pool_of(entry)});
}

// Whether the snapshot that describes the device of an event, and comes after it, makes the event redundant.
bool is_in_snapshot(const Entry& entry) {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  CudaAttachment& attachment = r.cuda_attachment;
  const auto device = static_cast<size_t>(entry.device_);
  if (!attachment.in_progress || attachment.has_snapshot[device]) return false;
  if (entry.action_ == Entry::SNAPSHOT) {
    if (attachment.has_snapshot.none()) attachment.position = r.events.size();
    attachment.has_snapshot.set(device);
    r.cuda_source = CudaSource::events;
  }
  // Of blocks that are known, and of segments, the snapshot tells nothing new.
  return !attachment.is_resumed || entry.action_ == Entry::ALLOC || entry.action_ == Entry::SNAPSHOT;
}

// Called while the allocator holds its lock: must neither allocate on the device nor wait for the GIL.
void on_entry(const Entry& entry) {
  if (!recorder().runs()) return;
  record_or_give_up([&] {
    if (is_in_snapshot(entry)) return;
    if (!recorder().active.load(std::memory_order_relaxed)) return on_entry_during_pause(entry);
    record_cuda_event({kind_of(entry.action_), entry.device_, entry.action_ == Entry::SNAPSHOT ? 0 : entry.addr_,
                       static_cast<int64_t>(entry.size_), reinterpret_cast<int64_t>(entry.stream_), pool_of(entry)});
  });
}

void set_in_progress(bool in_progress) {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  r.cuda_attachment = CudaAttachment{in_progress, r.cuda_source == CudaSource::events, {}, 0};
}

}  // namespace

bool cuda_supported() { return true; }

bool attach_cuda_allocator() {
  static bool is_attached = false;   // torch cannot detach a tracker; outside recordings it does nothing
  prepare_cuda_source(CudaSource::events);
  set_in_progress(true);
  if (is_attached) return true;
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_entry);
    is_attached = true;
  } catch (const std::exception&) {   // only torch's own caching allocator accepts trackers
    set_in_progress(false);
  }
  return is_attached;
}

#else

bool cuda_supported() { return false; }
bool attach_cuda_allocator() { return false; }

#endif

}  // namespace memtrace
