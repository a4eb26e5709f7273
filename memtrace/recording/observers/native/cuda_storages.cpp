#include "cuda_storages.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "cpu_allocator.h"

namespace memtrace {
namespace {

ForkSafeMutex deleters_mutex{ForkSafeMutex::Order::inner};
auto& deleters = *new std::unordered_map<void*, c10::DeleterFnPtr>;   // of the followed blocks, by context
// Deleter of the blocks whose allocation and free the allocator reports; null if it reports none.
std::atomic<c10::DeleterFnPtr> reported_deleter{nullptr};

// Blocks outlive the recording, so this stays valid for the life of the process.
void traced_deleter(void* context) {
  c10::DeleterFnPtr original = nullptr;
  {
    std::lock_guard<ForkSafeMutex> lock(deleters_mutex);
    const auto entry = deleters.find(context);
    if (entry != deleters.end()) {
      original = entry->second;
      deleters.erase(entry);
    }
  }
  Recorder& r = recorder();
  if (r.runs()) {
    record_or_give_up([&] {
      ThreadState& thread = thread_state();
      const auto address = reinterpret_cast<uint64_t>(context);
      r.add(Event{r.now(), address, 0, thread.current_op, kNone, thread.index, 0, EventKind::free, false});
      std::erase(thread.op_blocks, address);
    });
  }
  if (original != nullptr) original(context);
}

}  // namespace

void prepare_cuda_source(CudaSource source) {
  // Without CUDA there is no allocator: the events are those of a test.
  c10::Allocator* allocator = source == CudaSource::storages ? nullptr : c10::GetAllocator(c10::DeviceType::CUDA);
  reported_deleter = allocator == nullptr ? nullptr : allocator->raw_deleter();
}

CudaBlock follow_cuda_block(c10::DataPtr& data) {
  const c10::DeleterFnPtr deleter = data.get_deleter();
  if (deleter == &traced_deleter) return CudaBlock::followed;
  if (reported_deleter != nullptr && deleter == reported_deleter) return CudaBlock::reported;
  if (deleter == nullptr || data.get() != data.get_context()) return CudaBlock::unfollowed;
  std::lock_guard<ForkSafeMutex> lock(deleters_mutex);
  deleters[data.get_context()] = deleter;
  return data.compare_exchange_deleter(deleter, &traced_deleter) ? CudaBlock::newly_followed : CudaBlock::unfollowed;
}

void add_returned_cuda_block(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return;
  c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  const int64_t size = storage->sym_nbytes().maybe_as_int().value_or(0);
  if (data.get() == nullptr || !data.device().is_cuda() || size == 0) return;
  const auto address = reinterpret_cast<uint64_t>(data.get());
  if (follow_cuda_block(data) == CudaBlock::newly_followed) {
    record_allocation(address, size, static_cast<int8_t>(data.device().index() + 1), kNone);
  } else if (recorder().cuda_source.load(std::memory_order_relaxed) == CudaSource::history) {
    thread_state().op_blocks.push_back(address);
    thread_state().op_allocated_bytes += size;
  }
}

}  // namespace memtrace
