#include "late_events.h"

#include <algorithm>

namespace memtrace {
namespace {

constexpr int64_t kTimeErrorNs = 1000;   // the history's times are in microseconds

}  // namespace

const LateEventCalls::Call* LateEventCalls::running_at(const std::deque<Call>& calls, int64_t time_ns) const {
  auto call = std::upper_bound(calls.begin(), calls.end(), time_ns + kTimeErrorNs,
                               [](int64_t time, const Call& other) { return time < other.start_ns; });
  if (call == calls.begin()) return nullptr;
  --call;
  // Where the time is within the error of two calls, the earlier one covers its beginning.
  if (call != calls.begin() && call->start_ns > time_ns && (call - 1)->end_ns > time_ns) --call;
  return call->end_ns >= time_ns ? &*call : nullptr;
}

void LateEventCalls::assign(std::vector<Event>& events, const std::vector<OpCall>& ops, int64_t until_ns) {
  for (const OpCall& call : ops) calls_[call.thread].push_back({call.start_ns, call.start_ns + call.duration_ns, call.op});
  for (Event& event : events) {
    const bool is_late = event.device > 0 && event.thread == kNone && event.op == kNone;
    if (!is_late || (event.kind != EventKind::alloc && event.kind != EventKind::oom)) continue;
    int num_running = 0;
    for (const auto& [thread, calls] : calls_) {
      const Call* call = running_at(calls, event.time_ns);
      if (call == nullptr) continue;
      ++num_running;
      event.op = call->op;
      event.thread = thread;
    }
    if (num_running > 1) event.op = event.thread = kNone;
  }
  if (until_ns == kNone) return;
  for (auto& [thread, calls] : calls_)
    while (!calls.empty() && calls.front().end_ns + kTimeErrorNs < until_ns) calls.pop_front();
}

}  // namespace memtrace
