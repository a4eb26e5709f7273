// The time of records. There are several thousand readings in an operator-bound step, and reading the counter of the
// processor takes fewer instructions than asking the system.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace memtrace {

// Nanoseconds of std::chrono::steady_clock since `start`. Where Linux itself derives that clock from the processor's counter,
// so does this one, and `adjust` keeps the two together; elsewhere the clock is read directly.
class Clock {
 public:
  Clock();
  void start();    // time 0 is now
  void adjust();   // to be called about every second, by one thread at a time

  int64_t now() const noexcept {
#if defined(__x86_64__)
    for (uint32_t number = newest_.load(std::memory_order_acquire); number != kNoLine;) {
      const Line& line = lines_[number % lines_.size()];
      const auto ticks = static_cast<int64_t>(__rdtsc()) - line.ticks.load(std::memory_order_relaxed);
      const int64_t rate = line.rate.load(std::memory_order_relaxed), time = line.time_ns.load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      const uint32_t newest = newest_.load(std::memory_order_relaxed);
      if (newest == number) return time + static_cast<int64_t>((static_cast<__int128>(ticks) * rate) >> kRateBits);
      number = newest;
    }
#endif
    return steady_ns() - start_ns_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr int kRateBits = 32;
  static constexpr uint32_t kNoLine = 0;   // the numbers of lines begin with 1

  // The times from `ticks` on: time_ns + (ticks - this->ticks) * rate / 2^kRateBits.
  struct Line {
    std::atomic<int64_t> ticks{0}, time_ns{0}, rate{0};
  };
  struct Reading {
    int64_t ticks = 0, steady_ns = 0, suspended_ns = 0;
  };

  static int64_t steady_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static int64_t suspended_ns();   // how long the machine has been suspended; the steady clock stood still then
  static bool counter_is_reliable();
  static Reading read_both();

  const bool uses_counter_;
  Reading last_;                        // of the last adjustment; changed by one thread at a time
  std::atomic<int64_t> start_ns_{0};
  std::array<Line, 8> lines_;           // a thread that was interrupted while it read an old one reads again
  std::atomic<uint32_t> newest_{kNoLine};
};

}  // namespace memtrace
