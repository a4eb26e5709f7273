#include "foreign_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cpu_allocator.h"
#include "cuda_storages.h"
#include "state.h"

namespace memtrace {
namespace {

// Memory that torch recognises by its deleter, which must stay: shared memory, mapped files. Its storage is watched
// through a weak reference.
struct Watched {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::StorageImpl* key;
  uint64_t address;
};

ForkSafeMutex mutex;
auto& watched = *new std::vector<Watched>;   // never destroyed
auto& watched_keys = *new std::unordered_map<c10::StorageImpl*, size_t>;   // index into `watched`
std::atomic<size_t> num_watched{0};
size_t next_check = 0;

auto& excluded = *new std::vector<std::pair<uint64_t, uint64_t>>;   // never destroyed
std::atomic<bool> has_excluded{false};

bool is_excluded(uint64_t address) {
  if (!has_excluded.load(std::memory_order_relaxed)) return false;
  std::lock_guard<ForkSafeMutex> lock(mutex);
  const auto next = std::upper_bound(excluded.begin(), excluded.end(), std::make_pair(address, UINT64_MAX));
  return next != excluded.begin() && address < std::prev(next)->second;
}

void record_free(uint64_t address) {
  Recorder& r = recorder();
  if (!r.runs()) return;
  ThreadState& thread = thread_state();
  r.add(Event{r.now(), address, 0, thread.current_op, kNone, thread.index, 0, EventKind::free, true});
}

// The deleter of memory that a std::function frees: NumPy arrays, buffers, DLPack capsules.
c10::DeleterFnPtr function_deleter() {
  static const c10::DeleterFnPtr deleter = [] {
    static char byte;
    return c10::InefficientStdFunctionContext::makeDataPtr(&byte, [](void*) {}, c10::kCPU).get_deleter();
  }();
  return deleter;
}

// Takes the place of `function_deleter`: nothing in torch recognises memory by that deleter, and the free is seen at its
// exact time. It outlives the recording.
void traced_function_deleter(void* context) {
  record_free(reinterpret_cast<uint64_t>(static_cast<c10::InefficientStdFunctionContext*>(context)->ptr_));
  function_deleter()(context);
}

void stop_watching(size_t index) {   // requires the mutex
  watched_keys.erase(watched[index].key);
  if (index + 1 != watched.size()) {
    watched[index] = std::move(watched.back());
    watched_keys[watched[index].key] = index;
  }
  watched.pop_back();
  num_watched.store(watched.size(), std::memory_order_relaxed);
}

}  // namespace

Origin watch_memory(c10::StorageImpl* storage, c10::DataPtr& data) {
  if (data.device().is_cpu()) {
    if (has_traced_deleter(data)) return Origin::traced;
    if (trace_deleter(data)) {
      // What exists when the recording starts is listed then, on a thread of memtrace's. Autograd keeps memory alive that
      // is not listed: tensors that were saved for a backward pass, buckets of DistributedDataParallel.
      const bool may_be_older = thread_index_or_none() == kNone || current_phase(thread_state()) == Phase::backward;
      return may_be_older ? Origin::traced : Origin::unreported;
    }
  } else {
    const CudaBlock block = follow_cuda_block(data);
    if (block != CudaBlock::unfollowed) return block == CudaBlock::newly_followed ? Origin::foreign_new : Origin::traced;
  }
  if (is_excluded(reinterpret_cast<uint64_t>(data.get()))) return Origin::excluded;
  if (data.get_deleter() == traced_function_deleter) return Origin::foreign;
  if (data.get_context() != nullptr && data.compare_exchange_deleter(function_deleter(), traced_function_deleter))
    return Origin::foreign_new;
  std::lock_guard<ForkSafeMutex> lock(mutex);
  // A watched storage keeps its address, so the key identifies it.
  if (!watched_keys.try_emplace(storage, watched.size()).second) return Origin::foreign;
  auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  watched.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(strong), storage, reinterpret_cast<uint64_t>(data.get())});
  num_watched.store(watched.size(), std::memory_order_relaxed);
  return Origin::foreign_new;
}

void exclude_memory(std::vector<std::pair<uint64_t, uint64_t>> ranges) {
  std::lock_guard<ForkSafeMutex> lock(mutex);
  excluded = std::move(ranges);
  has_excluded = !excluded.empty();
}

void record_foreign_frees(size_t max_checks) {
  if (num_watched.load(std::memory_order_relaxed) == 0) return;
  c10::SmallVector<uint64_t, 8> freed;
  {
    std::unique_lock<ForkSafeMutex> lock(mutex, std::try_to_lock);
    if (!lock.owns_lock()) return;
    const size_t num_checks = std::min(max_checks, watched.size());
    for (size_t i = 0; i < num_checks && !watched.empty(); ++i) {
      if (next_check >= watched.size()) next_check = 0;
      if (watched[next_check].storage.expired()) {
        freed.push_back(watched[next_check].address);
        stop_watching(next_check);
      } else {
        ++next_check;
      }
    }
  }
  for (uint64_t address : freed) record_free(address);
}

void forget_foreign_memory() {
  std::lock_guard<ForkSafeMutex> lock(mutex);
  watched.clear();
  watched_keys.clear();
  num_watched = 0;
}

}  // namespace memtrace
