// The CUDA runtime API (libcudart) as far as torch's libraries import it, on top of the model in device.cpp.
// build.sh lists the functions that a version of torch imports and that are missing here.
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "device.h"

using namespace nullcuda;

extern "C" NULLCUDA_API void* nullcuda_driver_function(const char* name);   // driver.cpp

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t said(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t said(Result result) {
  switch (result) {
    case Result::ok: return cudaSuccess;
    case Result::out_of_memory: return said(cudaErrorMemoryAllocation);
    case Result::invalid_device: return said(cudaErrorInvalidDevice);
    case Result::invalid_handle: return said(cudaErrorInvalidResourceHandle);
    case Result::not_ready: return said(cudaErrorNotReady);
    case Result::not_supported: return said(cudaErrorNotSupported);
    case Result::forked: return said(cudaErrorInitializationError);
    case Result::capture_unsafe: return said(cudaErrorStreamCaptureUnsupported);
    case Result::capture_invalidated: return said(cudaErrorStreamCaptureInvalidated);
    case Result::capture_isolation: return said(cudaErrorStreamCaptureIsolation);
    case Result::capture_wrong_thread: return said(cudaErrorStreamCaptureWrongThread);
    case Result::captured_event: return said(cudaErrorCapturedEvent);
    case Result::illegal_state: return said(cudaErrorIllegalState);
    case Result::unmatched: return said(cudaErrorStreamCaptureMerge);
    case Result::invalid_value: break;
  }
  return said(cudaErrorInvalidValue);
}

const std::map<cudaError_t, std::pair<const char*, const char*>>& errors() {
  static const std::map<cudaError_t, std::pair<const char*, const char*>> texts = {
      {cudaSuccess, {"cudaSuccess", "no error"}},
      {cudaErrorInvalidValue, {"cudaErrorInvalidValue", "invalid argument"}},
      {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
      {cudaErrorInitializationError, {"cudaErrorInitializationError", "initialization error"}},
      {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {cudaErrorInvalidResourceHandle, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
      {cudaErrorNoDevice, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
      {cudaErrorNotSupported, {"cudaErrorNotSupported", "operation not supported"}},
      {cudaErrorIllegalState, {"cudaErrorIllegalState", "the operation cannot be performed in the present state"}},
      {cudaErrorStreamCaptureUnsupported,
       {"cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"}},
      {cudaErrorStreamCaptureInvalidated,
       {"cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"}},
      {cudaErrorStreamCaptureMerge,
       {"cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"}},
      {cudaErrorStreamCaptureIsolation,
       {"cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"}},
      {cudaErrorStreamCaptureWrongThread,
       {"cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"}},
      {cudaErrorCapturedEvent, {"cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"}},
      {cudaErrorPeerAccessAlreadyEnabled, {"cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"}},
  };
  return texts;
}

Stream* stream_of(cudaStream_t stream) { return nullcuda::stream_of(stream); }
Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

int64_t copy_ns(size_t bytes) { return static_cast<int64_t>(bytes / 16); }   // 16 GB/s

Kind kind_of(const void* pointer) {
  int device;
  uintptr_t base;
  size_t size;
  return nullcuda::kind_of(pointer, &device, &base, &size);
}

void fill(void* pointer, int value, size_t count) {
  constexpr size_t kHostPage = 4096;
  auto start = reinterpret_cast<uintptr_t>(pointer), end = start + count;
  const uintptr_t first = (start + kHostPage - 1) / kHostPage * kHostPage, last = end / kHostPage * kHostPage;
  if (value != 0 || first >= last) {
    memset(pointer, value, count);
    return;
  }
  // Zeros cost no memory: the pages are given back.
  memset(pointer, 0, first - start);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  memset(reinterpret_cast<void*>(last), 0, end - last);
}

// Kernels by the address of their host function; only torch.cuda._sleep has a duration of its own.
struct Kernel {
  bool spins;   // torch.cuda._sleep
};
std::map<const void*, Kernel>& kernels() {
  static auto* all = new std::map<const void*, Kernel>;
  return *all;
}
std::mutex& kernels_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

cudaError_t launch_kernel(const Kernel* kernel, void** arguments, cudaStream_t stream) {
  int64_t duration = settings().kernel_ns;
  if (kernel != nullptr && kernel->spins && arguments != nullptr) duration = *static_cast<int64_t*>(arguments[0]);
  return said(enqueue(stream_of(stream), duration, {}));
}

const Kernel* find_kernel(const void* function) {
  std::lock_guard<std::mutex> guard(kernels_mutex());
  auto found = kernels().find(function);
  return found == kernels().end() ? nullptr : &found->second;
}

struct Call {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Call pushed;

struct Executable {
  std::vector<Node> nodes;
  References objects;
};

void release_references(UserObject* object, unsigned count) {
  if (object->references.fetch_sub(count) > count) return;
  object->destroy(object->object);
  delete object;
}

}  // namespace

extern "C" {

// ---- kernels -------------------------------------------------------------------------------------------------------

NULLCUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
NULLCUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
NULLCUDA_API void __cudaUnregisterFatBinary(void**) {}
NULLCUDA_API char __cudaInitModule(void**) { return 1; }
NULLCUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
NULLCUDA_API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
NULLCUDA_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                                         dim3*, int*) {
  std::lock_guard<std::mutex> guard(kernels_mutex());
  kernels()[function] = {strstr(name, "11spin_kernel") != nullptr};
}
NULLCUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
NULLCUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
NULLCUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
NULLCUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch_kernel(find_kernel(kernel), arguments, stream);
}
NULLCUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch_kernel(find_kernel(function), arguments, stream);
}
NULLCUDA_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                                     cudaStream_t stream) {
  return launch_kernel(find_kernel(function), arguments, stream);
}
NULLCUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch_kernel(find_kernel(function), arguments, config->stream);
}
NULLCUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return said(enqueue(stream_of(stream), 0, [=] { function(data); }));
}
NULLCUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  return said(enqueue(stream_of(stream), 0, [=] { function(stream, cudaSuccess, data); }));
}
NULLCUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}
NULLCUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                                unsigned) {
  return *blocks = 2, cudaSuccess;
}
NULLCUDA_API cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                             cudaLibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<cudaLibrary_t>(1);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t* library, const char*, cudaJitOption*, void**, unsigned,
                                                 cudaLibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<cudaLibrary_t>(1);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaLibraryGetGlobal(void**, size_t*, cudaLibrary_t, const char*) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaLibraryGetManaged(void**, size_t*, cudaLibrary_t, const char*) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaLibraryGetUnifiedFunction(void**, cudaLibrary_t, const char*) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaLibraryGetKernelCount(unsigned*, cudaLibrary_t) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char*) {
  *kernel = reinterpret_cast<cudaKernel_t>(1);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  static std::mutex mutex;
  static std::map<const void*, void*> addresses;
  std::lock_guard<std::mutex> guard(mutex);
  void*& found = addresses[symbol];
  if (found == nullptr)
    if (Result r = allocate(current_device(), 4096, &found); r != Result::ok) return said(r);
  *address = found;
  return cudaSuccess;
}

// ---- devices -------------------------------------------------------------------------------------------------------

NULLCUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  if (is_forked()) return said(cudaErrorInitializationError);
  *count = visible_devices();
  return *count > 0 ? cudaSuccess : said(cudaErrorNoDevice);
}
NULLCUDA_API cudaError_t cudaGetDevice(int* device) {
  if (is_forked()) return said(cudaErrorInitializationError);
  *device = current_device();
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaSetDevice(int device) {
  if (Result r = ready(device); r != Result::ok) return said(r);
  current_device() = device;
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= visible_devices()) return said(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Null CUDA device");
  memset(p->uuid.bytes, 0x40 + device, sizeof p->uuid.bytes);
  p->totalGlobalMem = settings().memory;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 163 << 10;
  p->sharedMemPerMultiprocessor = 164 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 8, p->minor = 0;
  p->multiProcessorCount = 108;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 40 << 20;
  p->textureAlignment = 512;
  p->memPitch = 0x7fffffff;
  p->pciBusID = device + 1;
  p->concurrentKernels = p->canMapHostMemory = p->unifiedAddressing = p->managedMemory = 1;
  p->streamPrioritiesSupported = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, device); error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrManagedMemory: case cudaDevAttrCanMapHostMemory: *value = 1; break;
    case cudaDevAttrClockRate: *value = 1'000'000; break;   // kHz
    default: *value = 0;
  }
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
NULLCUDA_API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
NULLCUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = device != peer, cudaSuccess;
}
NULLCUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
NULLCUDA_API cudaError_t cudaDeviceSynchronize() { return said(wait_for_device(current_device())); }
NULLCUDA_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

NULLCUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
NULLCUDA_API cudaError_t cudaPeekAtLastError() { return last_error; }
NULLCUDA_API const char* cudaGetErrorName(cudaError_t error) {
  auto found = errors().find(error);
  return found == errors().end() ? "cudaErrorUnknown" : found->second.first;
}
NULLCUDA_API const char* cudaGetErrorString(cudaError_t error) {
  auto found = errors().find(error);
  return found == errors().end() ? "unknown error" : found->second.second;
}

NULLCUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                          cudaDriverEntryPointQueryResult* found) {
  *function = nullcuda_driver_function(name);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- memory --------------------------------------------------------------------------------------------------------

NULLCUDA_API cudaError_t cudaMalloc(void** pointer, size_t size) { return said(allocate(current_device(), size, pointer)); }
NULLCUDA_API cudaError_t cudaFree(void* pointer) { return said(release(pointer)); }
NULLCUDA_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  if (Result r = ready(current_device()); r != Result::ok) return said(r);
  memory_info(current_device(), free, total);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaMallocManaged(void**, size_t, unsigned) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return said(allocate_host(size, pointer)); }
NULLCUDA_API cudaError_t cudaMallocHost(void** pointer, size_t size) { return said(allocate_host(size, pointer)); }
NULLCUDA_API cudaError_t cudaFreeHost(void* pointer) { return said(release_host(pointer)); }
NULLCUDA_API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  uintptr_t base;
  size_t size;
  int device = -1;
  const Kind kind = kind_of(pointer, &device, &base, &size);
  attributes->type = kind == Kind::device ? cudaMemoryTypeDevice
                     : kind == Kind::host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = device;
  if (kind != Kind::unregistered) attributes->devicePointer = const_cast<void*>(pointer);
  if (kind != Kind::device) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

NULLCUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind, cudaStream_t stream) {
  Stream* s = stream_of(stream);
  const bool is_captured = s != nullptr && s->capture != nullptr;
  const bool must_wait = !is_captured && kind_of(to) == Kind::unregistered && kind_of(from) == Kind::device;
  if (Result r = enqueue(s, copy_ns(count), [=] { memmove(to, from, count); }); r != Result::ok) return said(r);
  return must_wait ? said(wait_for_stream(s)) : cudaSuccess;   // into memory that is not page-locked
}
NULLCUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t count, cudaMemcpyKind) {
  if (Result r = potentially_unsafe(); r != Result::ok) return said(r);
  Stream* s = stream_of(cudaStreamLegacy);
  if (Result r = enqueue(s, copy_ns(count), [=] { memmove(to, from, count); }); r != Result::ok) return said(r);
  return said(wait_for_stream(s));
}
NULLCUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t count, cudaStream_t stream) {
  return said(enqueue(stream_of(stream), copy_ns(count), [=] { memmove(to, from, count); }));
}
NULLCUDA_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                           size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return said(enqueue(stream_of(stream), copy_ns(width * height), [=] {
    for (size_t row = 0; row < height; ++row)
      memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }));
}
NULLCUDA_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t count, cudaStream_t stream) {
  return said(enqueue(stream_of(stream), copy_ns(count), [=] { fill(pointer, value, count); }));
}
NULLCUDA_API cudaError_t cudaMemset(void* pointer, int value, size_t count) {
  if (Result r = potentially_unsafe(); r != Result::ok) return said(r);
  return cudaMemsetAsync(pointer, value, count, cudaStreamLegacy);
}

// The driver's own pools (backend:cudaMallocAsync): plain memory.
NULLCUDA_API cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) {
  return said(allocate(current_device(), size, pointer, true));
}
NULLCUDA_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return said(release(pointer, true)); }
NULLCUDA_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(device + 1));
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
NULLCUDA_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Memory of allocations that graphs make themselves; no graph does here.
NULLCUDA_API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }

NULLCUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaIpcCloseMemHandle(void*) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return said(cudaErrorNotSupported); }
NULLCUDA_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return said(cudaErrorNotSupported); }

// ---- streams and events --------------------------------------------------------------------------------------------

NULLCUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  Stream* made = new_stream(priority, flags);
  if (made == nullptr) return said(is_forked() ? cudaErrorInitializationError : cudaErrorInvalidDevice);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
NULLCUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
NULLCUDA_API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return said(drop_stream(stream_of(stream))); }
NULLCUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  Stream* s = stream_of(stream);
  if (s == nullptr) return said(cudaErrorInitializationError);
  return *priority = s->priority, cudaSuccess;
}
NULLCUDA_API cudaError_t cudaStreamQuery(cudaStream_t stream) { return said(query_stream(stream_of(stream))); }
NULLCUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return said(wait_for_stream(stream_of(stream))); }
NULLCUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return said(wait_on_device(stream_of(stream), event_of(event)));
}

NULLCUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (Result r = ready(current_device()); r != Result::ok) return said(r);
  *event = reinterpret_cast<cudaEvent_t>(new Event{(flags & cudaEventDisableTiming) == 0, false, 0, 0, 0, {}});
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
NULLCUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return said(record(event_of(event), stream_of(stream)));
}
NULLCUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
NULLCUDA_API cudaError_t cudaEventQuery(cudaEvent_t event) { return said(query(event_of(event))); }
NULLCUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return said(wait_for_event(event_of(event))); }
NULLCUDA_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return said(elapsed_ms(event_of(start), event_of(end), ms));
}

// ---- capture and graphs --------------------------------------------------------------------------------------------

NULLCUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const int before = thread_capture_mode();
  thread_capture_mode() = *mode;
  *mode = static_cast<cudaStreamCaptureMode>(before);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return said(begin_capture(stream_of(stream), mode));
}
NULLCUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return said(end_capture(stream_of(stream), reinterpret_cast<Graph**>(graph)));
}
NULLCUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Stream* s = stream_of(stream);
  if (s == nullptr) return said(cudaErrorInitializationError);
  const Capture* capture = s->capture;
  *status = capture == nullptr       ? cudaStreamCaptureStatusNone
            : capture->invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                                  cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                                  const cudaGraphEdgeData** edges, size_t* count) {
  if (cudaError_t error = cudaStreamIsCapturing(stream, status); error != cudaSuccess) return error;
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  Stream* s = stream_of(stream);
  if (id != nullptr) *id = s->capture->id;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(s->capture->graph);
  if (nodes != nullptr) *nodes = reinterpret_cast<const cudaGraphNode_t*>(s->last.data());
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = s->last.size();
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                             unsigned) {
  return said(cudaErrorNotSupported);
}
NULLCUDA_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*,
                                                       const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) {
  return said(cudaErrorNotSupported);
}
NULLCUDA_API cudaError_t cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                          size_t, cudaGraphNodeParams*) {
  return said(cudaErrorNotSupported);
}
NULLCUDA_API cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) {
  return said(cudaErrorNotSupported);
}
NULLCUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  auto& all = reinterpret_cast<Graph*>(graph)->nodes;
  if (nodes != nullptr)
    for (size_t i = 0; i < *count && i < all.size(); ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(all[i].get());
  *count = all.size();
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* before, cudaGraphEdgeData* edges,
                                                      size_t* count) {
  auto& after = reinterpret_cast<Node*>(node)->after;
  if (before != nullptr)
    for (size_t i = 0; i < *count && i < after.size(); ++i) before[i] = reinterpret_cast<cudaGraphNode_t>(after[i]);
  if (edges != nullptr) memset(edges, 0, sizeof *edges * std::min(*count, after.size()));
  *count = after.size();
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  auto* executable = new Executable;
  for (const auto& node : reinterpret_cast<Graph*>(graph)->nodes) executable->nodes.push_back(*node);
  executable->objects = reinterpret_cast<Graph*>(graph)->objects;
  *made = reinterpret_cast<cudaGraphExec_t>(executable);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}
NULLCUDA_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* object, cudaHostFn_t destroy, unsigned references,
                                              unsigned) {
  *made = reinterpret_cast<cudaUserObject_t>(new UserObject{destroy, object, {references}});
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  release_references(reinterpret_cast<UserObject*>(object), count);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  auto* retained = reinterpret_cast<UserObject*>(object);
  if ((flags & cudaGraphUserObjectMove) == 0) retained->references += count;   // moved: the caller gives up its own
  reinterpret_cast<Graph*>(graph)->objects.emplace_back(nullptr, [=](void*) { release_references(retained, count); });
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  std::vector<Node*> nodes;
  for (Node& node : reinterpret_cast<Executable*>(executable)->nodes) nodes.push_back(&node);
  return said(launch(nodes, stream_of(stream)));
}
NULLCUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Executable*>(executable);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
NULLCUDA_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

}  // extern "C"
