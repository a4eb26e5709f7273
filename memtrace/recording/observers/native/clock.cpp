#include "clock.h"

#include <time.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace memtrace {
namespace {

// Readings closer to each other than this give no exact rate: for the first line, and for the others.
constexpr int64_t kFirstIntervalNs = 20'000'000, kIntervalNs = 500'000'000;
// The time in which a difference from the system's clock is made up for. A larger one than the maximum is corrected at
// once: the machine was suspended, or moved to another one.
constexpr double kCorrectionNs = 1e9;
constexpr int64_t kMaxDifferenceNs = 10'000'000;
// How far two readings of the suspended time may differ because they are no readings of one moment.
constexpr int64_t kSuspendedPrecisionNs = 1'000'000;

}  // namespace

// Linux uses the counter for its own clock only if it runs at a constant rate and alike on all processors.
bool Clock::counter_is_reliable() {
#if defined(__x86_64__)
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string name;
  return static_cast<bool>(file >> name) && name == "tsc";
#else
  return false;
#endif
}

Clock::Clock() : uses_counter_(counter_is_reliable()), last_(uses_counter_ ? read_both() : Reading{}) {}

int64_t Clock::suspended_ns() {
#if defined(CLOCK_BOOTTIME)
  timespec since_boot{};
  if (clock_gettime(CLOCK_BOOTTIME, &since_boot) == 0)
    return since_boot.tv_sec * int64_t{1'000'000'000} + since_boot.tv_nsec - steady_ns();
#endif
  return 0;
}

// Both clocks at one moment: of several tries that which took the shortest time.
Clock::Reading Clock::read_both() {
  Reading best;
#if defined(__x86_64__)
  int64_t shortest = INT64_MAX;
  for (int tries = 0; tries < 5; ++tries) {
    const int64_t before = steady_ns();
    const auto ticks = static_cast<int64_t>(__rdtsc());
    const int64_t after = steady_ns();
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = {ticks, before + shortest / 2, 0};
  }
  best.suspended_ns = suspended_ns();
#endif
  return best;
}

// The rate is known from the time since the library was loaded, or since the last recording.
void Clock::start() {
  newest_ = kNoLine;
  start_ns_ = steady_ns();
  adjust();
}

void Clock::adjust() {
  if (!uses_counter_) return;
  const Reading reading = read_both();
  const uint32_t number = newest_.load(std::memory_order_relaxed);
  const Line* line = number == kNoLine ? nullptr : &lines_[number % lines_.size()];
  const bool was_suspended = std::abs(reading.suspended_ns - last_.suspended_ns) > kSuspendedPrecisionNs;
  const int64_t interval_ns = reading.steady_ns - last_.steady_ns, ticks = reading.ticks - last_.ticks;
  if (!was_suspended && interval_ns < (line == nullptr ? kFirstIntervalNs : kIntervalNs)) return;
  last_ = reading;
  double rate = 0;
  if (!was_suspended && ticks > 0) {
    const auto unit = static_cast<double>(int64_t{1} << kRateBits);
    rate = unit * static_cast<double>(interval_ns) / static_cast<double>(ticks);
  } else if (line != nullptr) {
    rate = static_cast<double>(line->rate);
  } else {
    return;   // these two readings give no rate, and there is none from before
  }
  const int64_t exact = reading.steady_ns - start_ns_.load(std::memory_order_relaxed);
  int64_t time_ns = exact;
  if (line != nullptr) {
    const __int128 since = static_cast<__int128>(reading.ticks - line->ticks) * line->rate;
    const int64_t continued = line->time_ns + static_cast<int64_t>(since >> kRateBits), difference = exact - continued;
    if (std::abs(difference) <= kMaxDifferenceNs) {
      time_ns = continued;   // so that times do not go back
      rate *= 1 + static_cast<double>(difference) / kCorrectionNs;
    }
  }
  const uint32_t next = number + 1 == kNoLine ? number + 2 : number + 1;
  Line& target = lines_[next % lines_.size()];
  target.ticks = reading.ticks;
  target.time_ns = time_ns;
  target.rate = static_cast<int64_t>(rate);
  newest_.store(next, std::memory_order_release);
}

}  // namespace memtrace
