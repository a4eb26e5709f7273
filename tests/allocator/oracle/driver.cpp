// Puts requests, read line by line, to torch's CUDA caching allocator and prints what it does.
//
//   settings TEXT | capacity BYTES | order 0..2 | streams_done 0|1
//   alloc ID BYTES STREAM | free ID | use ID STREAM | empty_cache
//   begin_pool ID | end_pool ID | release_pool ID | end
//
// Prints "entry KIND ADDRESS BYTES STREAM POOL", "operation" before each, and at the end the state.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>

extern "C" {
extern size_t fake_capacity;
extern int fake_order, fake_streams_done;
}
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*func)(c10::DeviceIndex));
}

namespace allocator = c10::cuda::CUDACachingAllocator;

static const char* const kinds[] = {"alloc", "free_requested", "free", "segment_alloc", "segment_free",
                                    "segment_map", "segment_unmap", "snapshot", "oom"};

static c10::cuda::CUDAStream stream(size_t handle) {
  return c10::cuda::getStreamFromExternal((cudaStream_t)handle, 0);
}

static unsigned long long pool_number(const c10::MempoolId_t& id) {
  return id.first == 0 ? 2 * id.second : 2 * id.first + 1;
}

static void start() {
  static bool started = false;
  if (started) return;
  started = true;
  allocator::CUDAAllocatorConfig::set_expandable_segments_handle_type(
      allocator::Expandable_Segments_Handle_Type::POSIX_FD);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::init(1);
  allocator::attachAllocatorTraceTracker([](const allocator::TraceEntry& entry) {
    printf("entry %s %zu %zu %zu %llu\n", kinds[(int)entry.action_], entry.addr_, entry.size_,
           (size_t)entry.stream_, pool_number(entry.mempool_));
  });
}

static void print_state() {
  auto stats = allocator::getDeviceStats(0);
  printf("state %ld %ld %ld %ld\n", (long)stats.reserved_bytes[0].current, (long)stats.reserved_bytes[0].peak,
         (long)stats.num_alloc_retries, (long)stats.num_ooms);
  for (const auto& segment : allocator::snapshot().segments) {
    printf("segment %zu %zu %zu %llu %d %d\n", segment.address, segment.total_size, (size_t)segment.stream,
           pool_number(segment.owner_private_pool_id), (int)!segment.is_large, (int)segment.is_expandable);
    size_t address = segment.address;
    for (const auto& block : segment.blocks) {
      printf("block %zu %zu %zu %d\n", address, block.size, block.requested_size,
             block.allocated ? 1 : block.active ? 2 : 0);
      address += block.size;
    }
  }
}

int main() {
  std::map<long, c10::DataPtr> live;
  std::string line, word, text;
  while (std::getline(std::cin, line)) {
    std::istringstream rest(line);
    long id = 0;
    size_t number = 0, handle = 0;
    rest >> word;
    if (word == "capacity") { rest >> fake_capacity; continue; }
    if (word == "order") { rest >> fake_order; continue; }
    if (word == "settings") { rest >> text; c10::CachingAllocator::setAllocatorSettings(text); continue; }
    start();
    printf("operation\n");
    if (word == "streams_done") rest >> fake_streams_done;
    if (word == "alloc") {
      rest >> id >> number >> handle;
      c10::cuda::setCurrentCUDAStream(stream(handle));
      try { live[id] = allocator::get()->allocate(number); } catch (const c10::OutOfMemoryError&) {}
    }
    if (word == "free") { rest >> id; live.erase(id); }
    if (word == "use") { rest >> id >> handle; allocator::recordStream(live[id], stream(handle)); }
    if (word == "empty_cache") allocator::emptyCache();
    if (word == "begin_pool") { rest >> id; allocator::beginAllocateToPool(0, {0, (unsigned long long)id}, [](auto) { return true; }); }
    if (word == "end_pool") { rest >> id; allocator::endAllocateToPool(0, {0, (unsigned long long)id}); }
    if (word == "release_pool") { rest >> id; allocator::releasePool(0, {0, (unsigned long long)id}); }
    if (word == "end") print_state();
  }
  fflush(stdout);
  _Exit(0);  // the allocator's own end asks for a device
}
