#if defined(__x86_64__)
#include <immintrin.h> /* before the pragma: clang would put its target on the intrinsics */

#if defined(__clang__)
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#pragma clang attribute push(TARGET, apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "scalar.h"

#include "vec_avx512.h"

#include "encode.h"
#include "decode.h"
#include "dense.h"

const struct lowbit_kernels lowbit_avx512 = {"avx512", encode, decode_sum};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int lowbit_no_avx512; /* a translation unit must not be empty */
#endif
