/* Selection by magnitude: positions and values of |x| >= threshold, in order. NaN is not selected.
 *
 * Each version walks the tensor in groups and looks closer only where a group has a hit: at the densities of sparse
 * methods the time is that of reading memory. It counts on when the room is used up, so that the caller can come back
 * with enough.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

struct output {
    int32_t *indices;
    float *values;
    int64_t capacity, count;
};

static inline void put(struct output *out, int64_t index, float value) {
    if (out->count < out->capacity) {
        out->indices[out->count] = (int32_t)index;
        out->values[out->count] = value;
    }
    out->count++;
}

static void select_portable(const float *x, int64_t start, int64_t stop, float threshold, struct output *out) {
    int64_t i = start;
    for (; i + 32 <= stop; i += 32) {
        int any = 0;
        for (int j = 0; j < 32; j++) any |= fabsf(x[i + j]) >= threshold;
        if (!any) continue;
        for (int j = 0; j < 32; j++)
            if (fabsf(x[i + j]) >= threshold) put(out, i + j, x[i + j]);
    }
    for (; i < stop; i++)
        if (fabsf(x[i]) >= threshold) put(out, i, x[i]);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) static void
select_avx2(const float *x, int64_t start, int64_t stop, float threshold, struct output *out) {
    const __m256 limit = _mm256_set1_ps(threshold), sign = _mm256_set1_ps(-0.0f);
    int64_t i = start;
    for (; i + 32 <= stop; i += 32) {
        uint32_t hits = 0;
        for (int j = 0; j < 4; j++) {
            __m256 magnitude = _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i + 8 * j));
            hits |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(magnitude, limit, _CMP_GE_OQ)) << (8 * j);
        }
        for (; hits; hits &= hits - 1) {
            int64_t at = i + __builtin_ctz(hits);
            put(out, at, x[at]);
        }
    }
    select_portable(x, i, stop, threshold, out);
}

#endif

/* Elements [start, stop) of x. Returns how many there are; at most `capacity` of them are written. */
EXPORT int64_t lowbit_select(
    const char *isa, const float *x, int64_t start, int64_t stop, float threshold, int32_t *indices, float *values,
    int64_t capacity
) {
    struct output out = {indices, values, capacity, 0};
#if defined(__x86_64__)
    if (strcmp(isa, "portable") != 0) { /* wider vectors gain nothing: memory is the limit */
        select_avx2(x, start, stop, threshold, &out);
        return out.count;
    }
#else
    (void)isa;
#endif
    select_portable(x, start, stop, threshold, &out);
    return out.count;
}
