/* Selection by magnitude: by threshold, by chunk, and of the largest.
 *
 * By threshold: positions and values of |x| >= threshold, in order. NaN is not selected.
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
    if (strcmp(isa, "portable") != 0) { /* wider vectors are no faster: memory is the limit */
        select_avx2(x, start, stop, threshold, &out);
        return out.count;
    }
#else
    (void)isa;
#endif
    select_portable(x, start, stop, threshold, &out);
    return out.count;
}

/* The same while x is added to the sums: they are written back, and the largest exponent shows whether all are finite. */
enum { MAGNITUDE = 0x7FFFFFFF, LARGEST_FINITE = 0x7F7FFFFF };

static int32_t add_portable(
    float *sums, const float *x, int64_t start, int64_t stop, float threshold, struct output *out
) {
    int32_t nonfinite = 0;
    for (int64_t i = start; i < stop; i += 1024) {
        const int64_t end = i + 1024 < stop ? i + 1024 : stop;
        for (int64_t j = i; j < end; j++) {
            int32_t bits;
            sums[j] += x[j];
            memcpy(&bits, sums + j, sizeof bits);
            nonfinite |= (bits & MAGNITUDE) > LARGEST_FINITE;
        }
        select_portable(sums, i, end, threshold, out);
    }
    return nonfinite;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) static int32_t add_avx2(
    float *sums, const float *x, int64_t start, int64_t stop, float threshold, struct output *out
) {
    const __m256 limit = _mm256_set1_ps(threshold), sign = _mm256_set1_ps(-0.0f);
    const __m256i finite = _mm256_set1_epi32(LARGEST_FINITE);
    __m256i nonfinite = _mm256_setzero_si256();
    int64_t i = start;
    for (; i + 32 <= stop; i += 32) {
        uint32_t hits = 0;
        for (int j = 0; j < 4; j++) {
            __m256 sum = _mm256_add_ps(_mm256_loadu_ps(sums + i + 8 * j), _mm256_loadu_ps(x + i + 8 * j));
            __m256 magnitude = _mm256_andnot_ps(sign, sum);
            _mm256_storeu_ps(sums + i + 8 * j, sum);
            nonfinite = _mm256_or_si256(nonfinite, _mm256_cmpgt_epi32(_mm256_castps_si256(magnitude), finite));
            hits |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(magnitude, limit, _CMP_GE_OQ)) << (8 * j);
        }
        for (; hits; hits &= hits - 1) {
            int64_t at = i + __builtin_ctz(hits);
            put(out, at, sums[at]);
        }
    }
    return add_portable(sums, x, i, stop, threshold, out) || !_mm256_testz_si256(nonfinite, nonfinite);
}

#endif

/* Elements [start, stop): sums += x, then as lowbit_select. *nonfinite becomes 1 if a sum is inf or NaN. */
EXPORT int64_t lowbit_add_select(
    const char *isa, float *sums, const float *x, int64_t start, int64_t stop, float threshold, int32_t *indices,
    float *values, int64_t capacity, int32_t *nonfinite
) {
    struct output out = {indices, values, capacity, 0};
#if defined(__x86_64__)
    if (strcmp(isa, "portable") != 0) {
        *nonfinite = add_avx2(sums, x, start, stop, threshold, &out);
        return out.count;
    }
#else
    (void)isa;
#endif
    *nonfinite = add_portable(sums, x, start, stop, threshold, &out);
    return out.count;
}

/* By chunk: the `kept` largest of every CHUNK elements, positions ascending; of equal ones the first, NaN before all.
 * Magnitudes are compared as integers. The maxima of groups bound the kept-th largest from below, so that one pass
 * leaves few candidates; among those it is found bit by bit. */
enum { CHUNK = 4096 };

static inline __attribute__((always_inline)) int32_t kth_largest(const int32_t *keys, int count, int k) {
    int32_t found = 0;
    for (int bit = 30; bit >= 0; bit--) {
        int32_t trial = found | (int32_t)1 << bit;
        int reached = 0;
        for (int i = 0; i < count; i++) reached += keys[i] >= trial;
        if (reached >= k) found = trial;
    }
    return found;
}

/* Keys of at least `bound` and where they are; returns how many. */
typedef int collect_keys(const int32_t *keys, int32_t bound, int32_t *candidates, int16_t *places);

static int collect_portable(const int32_t *keys, int32_t bound, int32_t *candidates, int16_t *places) {
    int count = 0;
    for (int i = 0; i < CHUNK; i++) {
        candidates[count] = keys[i];
        places[count] = (int16_t)i;
        count += keys[i] >= bound;
    }
    return count;
}

static inline __attribute__((always_inline)) void
chunk_top_k(const float *x, int kept, int16_t *positions, float *values, collect_keys *collect) {
    int32_t keys[CHUNK], maxima[CHUNK], candidates[CHUNK];
    int16_t places[CHUNK];
    memcpy(keys, x, sizeof keys);
    for (int i = 0; i < CHUNK; i++) keys[i] &= 0x7FFFFFFF;
    int groups = 64;
    while (groups < CHUNK && groups < 2 * kept) groups *= 2;
    memcpy(maxima, keys, (size_t)groups * sizeof *maxima);
    for (int row = groups; row < CHUNK; row += groups)
        for (int i = 0; i < groups; i++) maxima[i] = keys[row + i] > maxima[i] ? keys[row + i] : maxima[i];
    const int32_t bound = kth_largest(maxima, groups, kept);
    const int count = collect(keys, bound, candidates, places);
    const int32_t smallest = kth_largest(candidates, count, kept);
    int ties = kept;
    for (int i = 0; i < count; i++) ties -= candidates[i] > smallest;
    for (int i = 0, slot = 0; i < count && slot < kept; i++) {
        if (candidates[i] < smallest || (candidates[i] == smallest && ties-- <= 0)) continue;
        positions[slot] = places[i];
        values[slot++] = x[places[i]];
    }
}

static inline __attribute__((always_inline)) void
chunks_top_k(
    const float *x, int64_t first, int64_t last, const int32_t *kept, int64_t room, int16_t *positions, float *values,
    collect_keys *collect
) {
    for (int64_t chunk = first; chunk < last; chunk++)
        if (kept[chunk] > 0)
            chunk_top_k(x + chunk * CHUNK, kept[chunk], positions + chunk * room, values + chunk * room, collect);
}

static void chunks_portable(
    const float *x, int64_t first, int64_t last, const int32_t *kept, int64_t room, int16_t *positions, float *values
) {
    chunks_top_k(x, first, last, kept, room, positions, values, collect_portable);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static int
collect_avx2(const int32_t *keys, int32_t bound, int32_t *candidates, int16_t *places) {
    const __m256i below = _mm256_set1_epi32(bound - 1); /* a bound of 0 becomes -1: keys are not negative */
    int count = 0;
    for (int i = 0; i < CHUNK; i += 32) {
        uint32_t hits = 0;
        for (int j = 0; j < 4; j++) {
            __m256i reached = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)(keys + i + 8 * j)), below);
            hits |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(reached)) << (8 * j);
        }
        for (; hits; hits &= hits - 1) {
            int at = i + __builtin_ctz(hits);
            candidates[count] = keys[at];
            places[count++] = (int16_t)at;
        }
    }
    return count;
}

__attribute__((target("avx2"))) static void chunks_avx2(
    const float *x, int64_t first, int64_t last, const int32_t *kept, int64_t room, int16_t *positions, float *values
) {
    chunks_top_k(x, first, last, kept, room, positions, values, collect_avx2);
}
#endif

/* Chunks [first, last) of x. Writes kept[chunk] <= min(room, CHUNK) entries at chunk * room. */
EXPORT void lowbit_chunk_top_k(
    const char *isa, const float *x, int64_t first, int64_t last, const int32_t *kept, int64_t room,
    int16_t *positions, float *values
) {
#if defined(__x86_64__)
    if (strcmp(isa, "portable") != 0) {
        chunks_avx2(x, first, last, kept, room, positions, values);
        return;
    }
#else
    (void)isa;
#endif
    chunks_portable(x, first, last, kept, room, positions, values);
}

/* The k largest of a tensor, positions ascending, of equal ones the first; of the sum with `addend`, which is written
 * back, unless that is NULL. As with chunks the maxima of groups bound the k-th largest from below: element i belongs to
 * group i % groups. */
static inline __attribute__((always_inline)) int32_t
group_maxima(float *x, const float *addend, int64_t numel, int groups, int32_t *maxima) {
    memset(maxima, 0, (size_t)groups * sizeof *maxima);
    for (int64_t row = 0; row < numel; row += groups) {
        const int length = numel - row < groups ? (int)(numel - row) : groups;
        if (addend)
            for (int i = 0; i < length; i++) x[row + i] += addend[row + i];
        for (int i = 0; i < length; i++) {
            int32_t key;
            memcpy(&key, x + row + i, sizeof key);
            key &= MAGNITUDE;
            maxima[i] = key > maxima[i] ? key : maxima[i];
        }
    }
    int32_t largest = 0;
    for (int i = 0; i < groups; i++) largest = maxima[i] > largest ? maxima[i] : largest;
    return largest;
}

static inline __attribute__((always_inline)) int64_t largest_of(
    const int32_t *found, const float *values, int64_t count, int k, int32_t *keys, int64_t *positions, float *largest
) {
    for (int64_t i = 0; i < count; i++) memcpy(keys + i, values + i, sizeof *keys);
    for (int64_t i = 0; i < count; i++) keys[i] &= MAGNITUDE;
    const int32_t smallest = kth_largest(keys, (int)count, k);
    int64_t ties = k, slot = 0;
    for (int64_t i = 0; i < count; i++) ties -= keys[i] > smallest;
    for (int64_t i = 0; i < count && slot < k; i++) {
        if (keys[i] < smallest || (keys[i] == smallest && ties-- <= 0)) continue;
        positions[slot] = found[i];
        largest[slot++] = values[i];
    }
    return slot;
}

typedef int32_t find_maxima(float *x, const float *addend, int64_t numel, int groups, int32_t *maxima);
typedef int32_t find_kth(const int32_t *keys, int count, int k);
typedef void select_values(const float *x, int64_t start, int64_t stop, float threshold, struct output *out);

static int32_t maxima_portable(float *x, const float *addend, int64_t numel, int groups, int32_t *maxima) {
    return group_maxima(x, addend, numel, groups, maxima);
}

static int32_t kth_portable(const int32_t *keys, int count, int k) { return kth_largest(keys, count, k); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static int32_t
maxima_avx2(float *x, const float *addend, int64_t numel, int groups, int32_t *maxima) {
    return group_maxima(x, addend, numel, groups, maxima);
}

__attribute__((target("avx2"))) static int32_t kth_avx2(const int32_t *keys, int count, int k) {
    return kth_largest(keys, count, k);
}
#endif

/* `scratch` has room for `groups` maxima, and for positions, values and keys of `capacity` candidates. Returns k; -1 if
 * there are more candidates or the k-th largest is 0, -2 if not all numbers are finite. x has its sums in any case. */
EXPORT int64_t lowbit_top_k(
    const char *isa, float *x, const float *addend, int64_t numel, int32_t k, int32_t groups, int32_t *scratch,
    int64_t capacity, int64_t *positions, float *values
) {
    find_maxima *maxima = maxima_portable;
    find_kth *kth = kth_portable;
    select_values *select = select_portable;
#if defined(__x86_64__)
    if (strcmp(isa, "portable") != 0) {
        maxima = maxima_avx2;
        kth = kth_avx2;
        select = select_avx2;
    }
#else
    (void)isa;
#endif
    if (maxima(x, addend, numel, groups, scratch) > LARGEST_FINITE) return -2;
    const int32_t bound = kth(scratch, groups, k);
    if (bound == 0) return -1;
    float threshold;
    memcpy(&threshold, &bound, sizeof threshold);
    int32_t *found = scratch + groups;
    float *candidates = (float *)(found + capacity);
    struct output out = {found, candidates, capacity, 0};
    select(x, 0, numel, threshold, &out);
    if (out.count > capacity) return -1;
    return largest_of(found, candidates, out.count, k, (int32_t *)(candidates + capacity), positions, values);
}

/* |x| at one place in each of `num` equal strata, where a hash of the key and the stratum says; of |x + addend| unless
 * that is NULL. num < numel < 2^61. Places are found some time before they are read, for memory to deliver them. */
enum { AHEAD = 64 };

EXPORT void lowbit_sample_magnitudes(
    const float *x, const float *addend, int64_t numel, int64_t num, uint32_t key, float *magnitudes
) {
    const int64_t step = numel / num, rest = numel % num;
    int64_t edge = 0, carried = 0, places[AHEAD];
    for (int64_t i = 0; i < num + AHEAD; i++) {
        if (i >= AHEAD) {
            const int64_t at = places[i % AHEAD];
            magnitudes[i - AHEAD] = fabsf(addend ? x[at] + addend[at] : x[at]);
        }
        if (i >= num) continue;
        int64_t length = step;
        carried += rest;
        if (carried >= num) {
            carried -= num;
            length++;
        }
        uint32_t hash = (uint32_t)i * 0x9E3779B9u + key;
        hash = (hash ^ (hash >> 16)) * 0x7FEB352Du;
        hash = (hash ^ (hash >> 15)) * 0x846CA68Bu;
        hash ^= hash >> 16;
        const int64_t at = edge + (int64_t)(((uint64_t)hash * (uint64_t)length) >> 32);
        places[i % AHEAD] = at;
        __builtin_prefetch(x + at);
        if (addend) __builtin_prefetch(addend + at);
        edge += length;
    }
}
