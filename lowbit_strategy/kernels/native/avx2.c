#if defined(__x86_64__)
#include <immintrin.h> /* before the pragma: clang would put its target on the intrinsics */

#if defined(__clang__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#pragma clang attribute push(TARGET, apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "scalar.h"

#include "vec_avx2.h"

#include "encode.h"
#include "decode.h"
#include "dense.h"

const struct lowbit_kernels lowbit_avx2 = {"avx2", encode, decode_sum};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
typedef int lowbit_no_avx2; /* a translation unit must not be empty */
#endif
