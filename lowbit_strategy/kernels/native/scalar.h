/* One number at a time: conversions, the hash behind stochastic rounding, the scale's rounding. */
#ifndef LOWBIT_SCALAR_H
#define LOWBIT_SCALAR_H

#include "lowbit.h"

#define BITS_ABS 0x7FFFFFFF
#define BITS_FLT_MAX 0x7F7FFFFF /* a magnitude with more than this is inf or NaN */
#define BITS_FLT_MIN 0x00800000
#define BITS_NAN 0x7FC00000
#define RESIDUAL_MAX_SCALE 0x1.02p121f /* BlockFormat.max_scale of 8 bits */
#define GOLDEN 0x9E3779B9u

enum { CODE_STREAM, RESIDUAL_STREAM };

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }

static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static inline float bfloat16_to_float(uint16_t b) { return float_of((uint32_t)b << 16); }

/* For x >= 0, inf included: the smallest bfloat16 not below x. */
static inline float round_up_bfloat16(float x) { return float_of((bits_of(x) + 0xFFFFu) & 0xFFFF0000u); }

static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7FFF) << 13;
    if (rest >= 0x7C00u << 13) return float_of(sign | 0x7F800000u | rest);
    return float_of(sign | bits_of(float_of(rest) * 0x1p112f)); /* the product also places subnormal halves */
}

/* Nearest, ties to even. */
static inline uint16_t float_to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & BITS_ABS;
    if (rest > 0x7F800000u) return (uint16_t)(sign | 0x7E00);
    if (rest >= 0x477FF000u) return (uint16_t)(sign | 0x7C00); /* at least 65520 */
    if (rest < 0x38800000u) /* below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits */
        return (uint16_t)(sign | (bits_of(float_of(rest) + 0.5f) - 0x3F000000u));
    rest += 0xFFFu + (rest >> 13 & 1);
    return (uint16_t)(sign | ((rest - (112u << 23)) >> 13));
}

static inline uint16_t float_to_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & BITS_ABS) > 0x7F800000u) return BITS_NAN >> 16;
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

static inline uint32_t hash32(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

static inline uint32_t stream_key(uint32_t seed, int64_t salt, uint32_t stream) {
    return hash32(hash32(seed ^ (uint32_t)salt) + stream);
}

/* Powers of two from 2^-126 to 2^127. */
static inline float exp2_int(int exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

#endif
