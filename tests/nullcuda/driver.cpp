// The CUDA driver API (libcuda) as far as torch asks for it: virtual memory for expandable segments, and contexts.
// Unknown functions return CUDA_SUCCESS; NULLCUDA_LOG=1 prints their names.
#include <cuda.h>
#include <string.h>

#include "device.h"

using namespace nullcuda;

namespace {

CUresult said(Result result) {
  switch (result) {
    case Result::ok: return CUDA_SUCCESS;
    case Result::out_of_memory: return CUDA_ERROR_OUT_OF_MEMORY;
    case Result::invalid_device: return CUDA_ERROR_INVALID_DEVICE;
    case Result::invalid_handle: return CUDA_ERROR_INVALID_HANDLE;
    case Result::not_ready: return CUDA_ERROR_NOT_READY;
    case Result::not_supported: return CUDA_ERROR_NOT_SUPPORTED;
    case Result::forked: return CUDA_ERROR_NOT_INITIALIZED;
    case Result::capture_unsafe: return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1)); }

CUresult unknown() { return CUDA_SUCCESS; }

}  // namespace

extern "C" {

NULLCUDA_API CUresult cuInit(unsigned) { return is_forked() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS; }
NULLCUDA_API CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
NULLCUDA_API CUresult cuDeviceGetCount(int* count) { return *count = visible_devices(), CUDA_SUCCESS; }
NULLCUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= visible_devices()) return CUDA_ERROR_INVALID_DEVICE;
  return *device = ordinal, CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  strncpy(name, "Null CUDA device", static_cast<size_t>(length));
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 8; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 108; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return said(ready(device));
}
NULLCUDA_API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = has_context(current_device()) ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuCtxSetCurrent(CUcontext context) {
  if (context != nullptr) current_device() = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS                  ? "no error"
          : error == CUDA_ERROR_OUT_OF_MEMORY    ? "out of memory"
          : error == CUDA_ERROR_INVALID_VALUE    ? "invalid argument"
          : error == CUDA_ERROR_NOT_SUPPORTED    ? "operation not supported"
          : error == CUDA_ERROR_NOT_INITIALIZED  ? "initialization error" : "unknown error";
  return CUDA_SUCCESS;
}
// Undocumented tables of NVIDIA's own libraries: none here.
NULLCUDA_API CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

// ---- virtual memory ------------------------------------------------------------------------------------------------

NULLCUDA_API CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *size = kPage, CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  uintptr_t got = 0;
  const Result result = reserve(size, &got);
  *address = got;
  return said(result);
}
NULLCUDA_API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) { return said(unreserve(address, size)); }
NULLCUDA_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                                  unsigned long long) {
  if (properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
  uint64_t piece = 0;
  const Result result = make_piece(properties->location.id, size, &piece);
  *handle = piece;
  return said(result);
}
NULLCUDA_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return said(drop_piece(handle)); }
NULLCUDA_API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle handle,
                               unsigned long long) {
  return said(map_piece(address, size, handle));
}
NULLCUDA_API CUresult cuMemUnmap(CUdeviceptr address, size_t size) { return said(unmap(address, size)); }
NULLCUDA_API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc*, size_t) {
  return said(allow_access(address, size));
}
NULLCUDA_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  uint64_t piece = 0;
  const Result result = piece_at(reinterpret_cast<uintptr_t>(address), &piece);
  *handle = piece;
  return said(result);
}
NULLCUDA_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                             CUmemGenericAllocationHandle handle) {
  memset(properties, 0, sizeof *properties);
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return said(piece_device(handle, &properties->location.id));
}
NULLCUDA_API CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                                   unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
NULLCUDA_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
NULLCUDA_API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  int device;
  uintptr_t start = 0;
  size_t length = 0;
  if (kind_of(reinterpret_cast<void*>(address), &device, &start, &length) != Kind::device) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = start;
  if (size != nullptr) *size = length;
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  int device;
  uintptr_t base;
  size_t size;
  if (kind_of(reinterpret_cast<void*>(address), &device, &base, &size) == Kind::unregistered) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *static_cast<int*>(value) = device;
  return CUDA_SUCCESS;
}

// ---- compiled kernels (torch's fusers, Triton): accepted and never run ----------------------------------------------

NULLCUDA_API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuModuleLoad(CUmodule* module, const char*) {
  return *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
NULLCUDA_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return *function = reinterpret_cast<CUfunction>(1), CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 0, CUDA_SUCCESS; }
NULLCUDA_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
NULLCUDA_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
NULLCUDA_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  return *blocks = 2, CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     CUstream stream, void**, void**) {
  return said(enqueue(stream_of(stream), settings().kernel_ns, {}));
}
NULLCUDA_API CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                unsigned, CUstream stream, void**) {
  return said(enqueue(stream_of(stream), settings().kernel_ns, {}));
}
NULLCUDA_API CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
NULLCUDA_API CUresult cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
NULLCUDA_API CUresult cuLinkComplete(CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
NULLCUDA_API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                             const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

NULLCUDA_API void* nullcuda_driver_function(const char* name) {
#define HAS(function) \
  if (strcmp(name, #function) == 0) return reinterpret_cast<void*>(function);
  // A name without its version is what its caller means: the macros of cuda.h add it.
  if (strcmp(name, "cuMemGetAddressRange") == 0) return reinterpret_cast<void*>(cuMemGetAddressRange);
  HAS(cuInit) HAS(cuDriverGetVersion) HAS(cuDeviceGetCount) HAS(cuDeviceGet) HAS(cuDeviceGetName) HAS(cuDeviceGetAttribute)
  HAS(cuDevicePrimaryCtxGetState) HAS(cuCtxGetCurrent) HAS(cuCtxSetCurrent) HAS(cuGetErrorString) HAS(cuGetExportTable)
  HAS(cuMemGetAllocationGranularity) HAS(cuMemAddressReserve) HAS(cuMemAddressFree) HAS(cuMemCreate) HAS(cuMemRelease)
  HAS(cuMemMap) HAS(cuMemUnmap) HAS(cuMemSetAccess) HAS(cuMemRetainAllocationHandle)
  HAS(cuMemGetAllocationPropertiesFromHandle) HAS(cuMemExportToShareableHandle) HAS(cuMemImportFromShareableHandle)
  HAS(cuPointerGetAttribute) HAS(cuModuleLoadData) HAS(cuModuleLoadDataEx) HAS(cuModuleUnload) HAS(cuModuleGetFunction)
  HAS(cuLaunchKernel)
#undef HAS
  log_line("driver function %s is not there: it answers CUDA_SUCCESS", name);
  return reinterpret_cast<void*>(unknown);
}
#undef cuGetProcAddress
NULLCUDA_API CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  *function = nullcuda_driver_function(name);
  if (found != nullptr) *found = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
NULLCUDA_API CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t) {
  *function = nullcuda_driver_function(name);
  return CUDA_SUCCESS;
}

}  // extern "C"
