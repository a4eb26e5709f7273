#include "collector.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "device_time.h"
#include "foreign_memory.h"

namespace memtrace {
namespace {

std::unique_ptr<Collector> current;

// Another thread of the parent may have been at work on the collector, so the child leaves it as it is.
void after_fork_in_child() {
  (void)current.release();
}

// Moves events after `until_ns` to `later`, for the next time: events that are still to arrive may be older than they.
void keep_later(std::vector<Event>& events, int64_t until_ns, std::vector<Event>& later) {
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time_ns < b.time_ns; });
  const auto first = std::upper_bound(events.begin(), events.end(), until_ns,
                                      [](int64_t time, const Event& event) { return time < event.time_ns; });
  later.assign(first, events.end());
  events.erase(first, events.end());
}

// The next batch is likely to be as large as the last one, and columns that grow are copied, into new pages each time.
void reserve_as_many(const Tables& last, Tables& next) {
  const auto slightly_more = [](size_t num_rows) { return num_rows + num_rows / 8; };
  try {
    next.events.reserve(slightly_more(last.events.num_rows()));
    next.ops.reserve(slightly_more(last.ops.num_rows()));
  } catch (const std::bad_alloc&) {
    // They grow, then.
  }
}

// Requires the recorder's mutex.
int64_t start_of_running_calls() {
  int64_t first = INT64_MAX;
  for (ThreadState* thread : recorder().threads) {
    const int64_t start = std::atomic_ref(thread->op_start_ns).load(std::memory_order_relaxed);
    if (start != kNone) first = std::min(first, start);
  }
  return first;
}

// Requires the recorder's mutex.
size_t num_waiting() { return recorder().events.size() + recorder().ops.size(); }

}  // namespace

Collector* collector() { return current.get(); }

void start_collector() {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  (void)registered;
  current = std::make_unique<Collector>();
}

void Collector::collect(int64_t until_ns) {
  std::lock_guard<std::mutex> collecting(mutex_);
  try {
    resolve(until_ns);
  } catch (const std::bad_alloc&) {
    rows_ = {};   // columns may have different lengths
    throw;
  }
}

void Collector::resolve(int64_t until_ns) {
  Recorder& r = recorder();
  r.clock.adjust();
  if (r.runs()) record_foreign_frees(SIZE_MAX);
  std::vector<Event> events, later;
  std::vector<OpCall> ops;
  std::vector<Span> spans;
  std::vector<StreamPool> stream_pools;
  bool is_pause_new = false;
  {
    Lock lock(r.mutex);
    is_pause_new = r.paused && !r.knows_cuda_blocks && !r.cuda_attachment.in_progress;
    stream_pools = r.stream_pools;
    if (!r.cuda_attachment.in_progress) {   // otherwise the content of the allocator's snapshot is inserted first
      events.swap(r.events);
      ops.swap(r.ops);
      spans.swap(r.spans);
      r.events.swap(r.spare_events);
      r.ops.swap(r.spare_ops);
    }
    if (until_ns != kNone) until_ns = std::min(until_ns, start_of_running_calls() - 1);
    resolver_.set_settings(r.cuda_settings);
    r.writer_notified = false;
  }
  r.buffer_taken.notify_all();
  if (until_ns != kNone) keep_later(events, until_ns, later);
  if (r.cuda_source.load() == CudaSource::history) late_calls_.assign(events, ops, until_ns);
  take_device_times(rows_.device_times);
  resolver_.add(events, stream_pools, rows_);
  resolver_.add(ops, rows_);
  resolver_.add(spans, rows_);
  events.clear();
  ops.clear();
  Lock lock(r.mutex);
  if (r.paused && is_pause_new) {   // all that the window recorded is resolved by now
    r.cuda_blocks = resolver_.cuda_blocks();
    r.knows_cuda_blocks = true;
  }
  if (r.active) {
    r.spare_events.swap(events);
    r.spare_ops.swap(ops);
  }
  if (!later.empty()) r.events.insert(r.events.begin(), later.begin(), later.end());
}

bool Collector::may_collect() {
  Recorder& r = recorder();
  Lock lock(r.mutex);
  return r.cuda_source.load() != CudaSource::history && !r.cuda_attachment.in_progress;
}

Collector::TimePoint Collector::next_look(TimePoint now, size_t num_waiting) {
  const size_t num_before = std::exchange(num_at_last_look_, num_waiting);
  const size_t num_new = num_waiting - std::min(num_before, num_waiting);
  const TimePoint::duration elapsed = now - std::exchange(last_look_, now);
  const size_t num_missing = recorder().options.collect_records - num_waiting;
  TimePoint::duration expected = kLongestSleep;
  if (num_new > 0) {
    const auto until_full = elapsed * (static_cast<double>(num_missing) / static_cast<double>(num_new));
    if (until_full < kLongestSleep) expected = std::chrono::duration_cast<TimePoint::duration>(until_full);
  }
  // Few records say little about those to come: before the first step there are hardly any.
  last_sleep_ = std::clamp(expected, kShortestSleep, std::min(2 * last_sleep_, kLongestSleep));
  return now + last_sleep_;
}

size_t Collector::wait(double seconds, size_t enough_events) {
  Recorder& r = recorder();
  const auto duration = std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
  const TimePoint deadline = std::chrono::steady_clock::now() + duration;
  while (true) {
    size_t waiting = 0;
    bool must_return = false;
    {
      std::unique_lock<SpinLock> lock(r.mutex);
      while (true) {
        const TimePoint now = std::chrono::steady_clock::now();
        waiting = num_waiting();
        must_return = !r.runs() || r.must_wake || now >= deadline;
        if (must_return || waiting >= r.options.collect_records) break;
        r.wake_writer.wait_until(lock, std::min(deadline, next_look(now, waiting)), [&] {
          return !r.runs() || r.must_wake || num_waiting() >= r.options.wake_records;
        });
      }
      r.must_wake = false;
    }
    if (!must_return && may_collect()) {
      last_look_ = std::chrono::steady_clock::now();
      num_at_last_look_ = 0;
      collect(kNone);
      waiting = 0;
    } else {
      must_return = true;
    }
    std::lock_guard<std::mutex> collecting(mutex_);
    const size_t num_events = rows_.events.num_rows();
    if (must_return || num_events >= enough_events) return waiting + num_events;
  }
}

Batch Collector::take_rows() {
  std::lock_guard<std::mutex> collecting(mutex_);
  Tables rows = std::exchange(rows_, {});
  if (recorder().runs()) reserve_as_many(rows, rows_);
  LiveChanges changes = live_changes_.find(rows);
  return {std::move(rows), std::move(changes)};
}

}  // namespace memtrace
