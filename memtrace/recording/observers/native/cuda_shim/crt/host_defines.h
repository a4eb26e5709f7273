// The qualifiers that CUDA's runtime headers use, defined for a C++ compiler that builds host code only. CUDA's own
// header of this name belongs to the CUDA compiler, which the wheels that torch depends on do not contain.
#pragma once

// Execution and memory spaces mean nothing on the host.
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__

// Marks of built-in types and functions, which only a CUDA compiler reads.
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __location__(a)

// Linkage and calling convention: those of the platform.
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __cdecl
#define __import__
#define __export__
#define __thread__ __thread

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(a) __align__(a)
#define __annotate__(a) __attribute__((a))
#define __no_return__ __attribute__((noreturn))
#define __forceinline__ __inline__ __attribute__((always_inline))
// There is no __noinline__: the host functions do not use it, and a macro of that name breaks libstdc++, which spells an
// attribute so.
