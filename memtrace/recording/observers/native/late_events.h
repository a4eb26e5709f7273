// Gives events that were read afterwards from torch's history the operator call in which they happened.
#pragma once

#include <deque>
#include <unordered_map>

#include "state.h"

namespace memtrace {

class LateEventCalls {
 public:
  // Sets operator and thread of the allocations and out-of-memory errors among `events`, where calls of only one thread
  // ran at their time. `ops` are the calls that returned since the last time; later events are not before `until_ns`.
  void assign(std::vector<Event>& events, const std::vector<OpCall>& ops, int64_t until_ns);

 private:
  struct Call {
    int64_t start_ns, end_ns, op;
  };
  const Call* running_at(const std::deque<Call>& calls, int64_t time_ns) const;
  std::unordered_map<int16_t, std::deque<Call>> calls_;   // by thread, in the order of time
};

}  // namespace memtrace
