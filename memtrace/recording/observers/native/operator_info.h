// What the schema of an operator says about its arguments and its result.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <string_view>
#include <vector>

#include "state.h"

namespace memtrace {

enum class Role : uint8_t { plain, view, range_enter, range_exit, no_access };

constexpr size_t kMaxTypedArguments = 64;

struct ArgumentAccess {
  uint16_t index;
  bool is_list, reads, writes;
};

struct OperatorInfo {
  int32_t name = kNone;
  std::atomic<uint32_t> epoch{0};   // number of the recording that `name` belongs to
  Role role = Role::plain;
  bool writes_result = true;      // false: the result is uninitialised memory (empty)
  bool composite = false;         // implemented by calls of other operators
  bool reduces_over_ranks = false;   // sums its arguments over the ranks of a process group
  bool autocasts_cpu = false, autocasts_cuda = false;
  uint16_t num_arguments = 0;
  std::vector<ArgumentAccess> accesses;   // of the arguments whose memory the operator accesses
  uint64_t reads = 0, writes = 0;         // the same, with one bit for each of the first `kMaxTypedArguments` arguments
};

inline bool starts_with(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }

// Whether an operator is implemented by calls of other operators alone.
bool is_composite(const c10::OperatorHandle& op);

// The information about an operator, inspected at the first call and cached.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

}  // namespace memtrace
