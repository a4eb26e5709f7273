// The macros that cuda_runtime_api.h takes from crt/host_defines.h, for compilers that know nothing of CUDA. The CUDA
// runtime package that torch installs has no crt/ folder; a CUDA toolkit is not needed.
#pragma once
#define __no_return__ __attribute__((noreturn))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __thread__ __thread
#define __annotate__(a) __attribute__((a))
#define __location__(a)
#define __import__
#define __export__
#define __cdecl
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
