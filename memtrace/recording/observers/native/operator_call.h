// Records one call of an operator that the dispatcher mode sees.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "device_time.h"
#include "dispatch.h"
#include "operator_info.h"
#include "state.h"

namespace memtrace {

constexpr c10::DispatchKeySet kBelowMode{c10::DispatchKeySet::FULL_AFTER, kMode};

// Handlers of these keys call other operators on real tensors, which are recorded instead of the call itself.
constexpr c10::DispatchKeySet kKeysThatCallOperators({
    c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchBatchedDecomposition, c10::DispatchKey::FuncTorchVmapMode,
    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchDynamicLayerBackMode});

// What is recorded of a call.
enum class Way : uint8_t {
  call,           // the call with its accesses
  view,           // the autograd nodes that it creates
  seen_through,   // the operators that it consists of, instead of the call itself
  nothing         // neither the call nor the operators that it consists of
};

inline Way way_of(const OperatorInfo& info, c10::DispatchKeySet keys) {
  const bool is_seen_through = info.composite || keys.has_any(kKeysThatCallOperators) ||
                               (info.autocasts_cpu && keys.has(c10::DispatchKey::AutocastCPU)) ||
                               (info.autocasts_cuda && keys.has(c10::DispatchKey::AutocastCUDA));
  if (info.role > Role::view && !(info.role == Role::no_access && is_seen_through)) return Way::nothing;
  if (is_seen_through) return Way::seen_through;
  return info.role == Role::view ? Way::view : Way::call;
}

// The information about an operator while a recording runs; nullptr if nothing is to be recorded. Disables the mode of
// the thread if no recording runs.
const OperatorInfo* info_of_call(const c10::OperatorHandle& op);

// A call that is not recorded itself, from before it (constructor) to its end (destructor), even if the operator throws.
class Passage {
 public:
  Passage(const OperatorInfo& info, Way way);
  ~Passage();
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

 private:
  const OperatorInfo& info_;
  ThreadState& thread_;
  const Way way_;
  const int64_t first_;   // the next autograd node
  int64_t outer_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

// A recorded call, from its start (`begin`, after its arguments) to its end (destructor), even if the operator throws.
class Call {
 public:
  explicit Call(const OperatorInfo& info);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Whether `begin` is to be preceded by `add_argument` for the arguments that the operator accesses.
  bool records_accesses() const { return recorder().options.accesses; }
  void add_argument(const at::Tensor& tensor, bool reads, bool writes);
  void begin();

  // Whether the blocks that the operator returns are added, because the allocator did not report them while it ran.
  bool adds_results() const { return recorder().cuda_source.load(std::memory_order_relaxed) != CudaSource::undecided; }
  void add_result(const at::Tensor& tensor);

 private:
  struct Access {
    Memory memory;
    bool reads, writes;
  };

  void start_on_device(int64_t min_bytes);
  void push(Recorder& r, const Memory& memory, EventKind kind, int64_t time);
  void push_writes(Recorder& r, int64_t end);
  void label_buckets(Recorder& r, int64_t time);

  c10::impl::ExcludeDispatchKeyGuard guard_{kMode};
  const OperatorInfo& info_;
  ThreadState& thread_;
  c10::SmallVector<Access, 16> accesses_;
  int64_t outer_op_, op_, start_ = kNone, sequence_;
  int num_exceptions_ = 0;        // counted only where failed allocations become known later
  uint64_t ticket_ = kNotTimed;   // of the GPU timing
  int8_t device_ = 0;
};

}  // namespace memtrace
