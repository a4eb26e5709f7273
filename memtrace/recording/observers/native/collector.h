// Collects records on the writer's thread: takes the buffers that training threads fill, resolves them without the
// interpreter lock, and keeps the rows until the writer takes them as one large batch.
#pragma once

#include <chrono>
#include <mutex>

#include "late_events.h"
#include "live_changes.h"

namespace memtrace {

class Collector {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Takes the records up to `until_ns` (kNone: all of them) and resolves them. Throws std::bad_alloc.
  void collect(int64_t until_ns);
  // Sleeps until there are `enough_events` rows of events, `seconds` have passed, `Recorder::must_wake` is set or the
  // recording ends; collects meanwhile whenever enough records wait. Returns the number of rows and waiting records.
  // It looks by itself, at the time at which they are expected: to wake it costs a training thread a system call and
  // an interrupt of another processor.
  size_t wait(double seconds, size_t enough_events);
  // Returns and removes the rows. Throws std::bad_alloc.
  Batch take_rows();

 private:
  static constexpr TimePoint::duration kShortestSleep = std::chrono::milliseconds(1);
  static constexpr TimePoint::duration kLongestSleep = std::chrono::milliseconds(200);

  // Whether records can be resolved as they come: otherwise some that belong before them are still to arrive.
  static bool may_collect();
  void resolve(int64_t until_ns);
  // When enough records are expected to wait, by how many came since the last look. Called with fewer than enough.
  TimePoint next_look(TimePoint now, size_t num_waiting);

  std::mutex mutex_;
  Resolver resolver_;
  LateEventCalls late_calls_;
  LiveChangesFinder live_changes_;
  Tables rows_;
  TimePoint last_look_ = TimePoint::clock::now();
  TimePoint::duration last_sleep_ = kShortestSleep;
  size_t num_at_last_look_ = 0;
};

// The collector of the current recording, which `start_collector` makes; null before the first one.
Collector* collector();
// Replaces the collector of the last recording. Call it while no recording is running.
void start_collector();

}  // namespace memtrace
