/* A CUDA runtime and driver that hand out addresses and count bytes: enough for the caching allocator, and no more. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The header renames these to versioned symbols; the library asks for the plain ones. */
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cudaGraphNodeGetDependencies

#define MIB ((size_t)1 << 20)
#define MAX_SEGMENTS (1 << 20)
#define SHUFFLED 4096

size_t fake_capacity = (size_t)80 << 30;
int fake_order = 0;         /* addresses of new segments: 0 ascending, 1 descending, 2 shuffled */
int fake_streams_done = 1;  /* whether recorded events have completed when asked */

static size_t used, num_segments;
static struct { size_t address, size; } segments[MAX_SEGMENTS];
static size_t next_up = (size_t)0x700000000000, next_down = (size_t)0x700000000000, next_range = (size_t)0x300000000000;
static cudaError_t last_error = cudaSuccess;

static size_t shuffled(void) {
  static uint64_t state = 88172645463325252ull;
  static unsigned char taken[SHUFFLED];
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  unsigned slot = state % SHUFFLED;
  while (taken[slot]) slot = (slot + 1) % SHUFFLED;
  taken[slot] = 1;
  return ((size_t)2 << 48) + ((size_t)slot << 36);
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (used + size > fake_capacity) return last_error = cudaErrorMemoryAllocation;
  size_t room = (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB), address;
  if (fake_order == 0) address = next_up, next_up += room;
  else if (fake_order == 1) address = next_down -= room;
  else address = shuffled();
  segments[num_segments].address = address, segments[num_segments++].size = size;
  used += size;
  *pointer = (void*)address;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  for (size_t i = num_segments; pointer && i-- > 0;)
    if (segments[i].address == (size_t)pointer && segments[i].size) {
      used -= segments[i].size, segments[i].size = 0;
      break;
    }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = fake_capacity - used, *total = fake_capacity;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = fake_capacity;
  return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return fake_streams_done ? cudaSuccess : (last_error = cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = (cudaEvent_t)malloc(1);
  return cudaSuccess;
}

/* What answers the same whatever it is asked. */
const char* cudaGetErrorString(cudaError_t error) { return "no such device"; }
const char* cudaGetErrorName(cudaError_t error) { return "no such device"; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) { *a = *b = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e, size_t* n) {
  return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  static size_t handle = 0x100;
  *stream = (cudaStream_t)(handle += 0x100);
  return cudaSuccess;
}

#define FINE(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define NOT_HERE(name, ...) cudaError_t name(__VA_ARGS__) { return cudaErrorNotSupported; }
FINE(cudaSetDevice, int d)
FINE(cudaDeviceSynchronize, void)
FINE(cudaDeviceEnablePeerAccess, int d, unsigned f)
FINE(cudaEventDestroy, cudaEvent_t e)
FINE(cudaEventElapsedTime, float* t, cudaEvent_t a, cudaEvent_t b)
FINE(cudaEventRecord, cudaEvent_t e, cudaStream_t s)
FINE(cudaEventSynchronize, cudaEvent_t e)
FINE(cudaMemcpy, void* a, const void* b, size_t n, enum cudaMemcpyKind k)
FINE(cudaMemcpyAsync, void* a, const void* b, size_t n, enum cudaMemcpyKind k, cudaStream_t s)
FINE(cudaMemcpyPeerAsync, void* a, int b, const void* c, int d, size_t n, cudaStream_t s)
FINE(cudaStreamQuery, cudaStream_t s)
FINE(cudaStreamSynchronize, cudaStream_t s)
FINE(cudaStreamWaitEvent, cudaStream_t s, cudaEvent_t e, unsigned f)
FINE(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode* m)
NOT_HERE(cudaDeviceGetDefaultMemPool, cudaMemPool_t* p, int d)
NOT_HERE(cudaFreeAsync, void* p, cudaStream_t s)
NOT_HERE(cudaMallocAsync, void** p, size_t n, cudaStream_t s)
NOT_HERE(cudaGraphNodeGetDependencies, cudaGraphNode_t a, cudaGraphNode_t* b, cudaGraphEdgeData* c, size_t* n)
NOT_HERE(cudaIpcCloseMemHandle, void* p)
NOT_HERE(cudaIpcGetMemHandle, cudaIpcMemHandle_t* h, void* p)
NOT_HERE(cudaIpcOpenMemHandle, void** p, cudaIpcMemHandle_t h, unsigned f)
NOT_HERE(cudaMemPoolGetAttribute, cudaMemPool_t p, enum cudaMemPoolAttr a, void* v)
NOT_HERE(cudaMemPoolSetAttribute, cudaMemPool_t p, enum cudaMemPoolAttr a, void* v)
NOT_HERE(cudaMemPoolSetAccess, cudaMemPool_t p, const struct cudaMemAccessDesc* d, size_t n)
NOT_HERE(cudaMemPoolTrimTo, cudaMemPool_t p, size_t n)

/* The driver, for expandable segments. */
static CUresult reserve_range(CUdeviceptr* address, size_t size, size_t a, CUdeviceptr hint, unsigned long long flags) {
  *address = next_range;
  next_range = (next_range + size + ((size_t)1 << 36)) >> 30 << 30;
  return CUDA_SUCCESS;
}
static CUresult make_pages(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* p,
                           unsigned long long flags) {
  if (used + size > fake_capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size, *handle = size;
  return CUDA_SUCCESS;
}
static CUresult drop_pages(CUmemGenericAllocationHandle handle) { used -= handle; return CUDA_SUCCESS; }
static CUresult error_text(CUresult error, const char** text) { *text = "no such device"; return CUDA_SUCCESS; }
static CUresult one(int* value, CUdevice_attribute attribute, CUdevice device) { *value = 1; return CUDA_SUCCESS; }
static CUresult fine(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* found) {
  *function = (void*)fine;
  if (!strcmp(name, "cuMemAddressReserve")) *function = (void*)reserve_range;
  if (!strcmp(name, "cuMemCreate")) *function = (void*)make_pages;
  if (!strcmp(name, "cuMemRelease")) *function = (void*)drop_pages;
  if (!strcmp(name, "cuGetErrorString")) *function = (void*)error_text;
  if (!strcmp(name, "cuDeviceGetAttribute")) *function = (void*)one;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
