/* What a sparse step consists of except selection: how large a gradient is, positions as bytes and back, and what is
 * left of the residual. The definitions are in kernels/reference/sparse.py. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { MAGNITUDE = 0x7FFFFFFF, LARGEST_FINITE = 0x7F7FFFFF, BLOCK_BITS = 16 };

/* Magnitudes are compared as integers: NaN is larger than infinity, infinity than all numbers. */
static inline __attribute__((always_inline)) int32_t largest_key(const float *x, int64_t start, int64_t stop) {
    int32_t largest = 0;
    for (int64_t i = start; i < stop; i++) {
        int32_t key;
        memcpy(&key, x + i, sizeof key);
        key &= MAGNITUDE;
        largest = key > largest ? key : largest;
    }
    return largest;
}

typedef int32_t find_largest(const float *x, int64_t start, int64_t stop);

static int32_t largest_portable(const float *x, int64_t start, int64_t stop) { return largest_key(x, start, stop); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static int32_t largest_avx2(const float *x, int64_t start, int64_t stop) {
    return largest_key(x, start, stop);
}
#endif

/* The largest |x| of elements [start, stop); infinity if one is inf or NaN. */
EXPORT float lowbit_peak(const char *isa, const float *x, int64_t start, int64_t stop) {
    find_largest *largest = largest_portable;
#if defined(__x86_64__)
    if (strcmp(isa, "portable") != 0) largest = largest_avx2; /* wider vectors are no faster: memory is the limit */
#else
    (void)isa;
#endif
    const int32_t key = largest(x, start, stop);
    float peak;
    memcpy(&peak, &key, sizeof peak);
    return key > LARGEST_FINITE ? INFINITY : peak;
}

/* Entries of all parameters, `sizes[v]` of each, ascending, into the order of messages: by destination, parameter,
 * position. Owners have `spans[v]` consecutive elements of a parameter, whose first block is `first_block[v]`. `counts`
 * is 0 before.
 *
 * With one destination the order stays: `order` and `places` are not written. Else order[j] is where entry j of the
 * messages comes from, and places has how many entries each destination gets of each parameter. */
EXPORT void lowbit_locate(
    const int64_t *indices, const int64_t *sizes, const int64_t *spans, const int64_t *first_block, int64_t num_views,
    int64_t num_blocks, int64_t num_destinations, int32_t *counts, uint16_t *positions, int64_t *order, int64_t *places
) {
    if (num_destinations == 1) {
        for (int64_t v = 0, at = 0; v < num_views; v++)
            for (const int64_t end = at + sizes[v]; at < end; at++) {
                positions[at] = (uint16_t)indices[at];
                counts[first_block[v] + (indices[at] >> BLOCK_BITS)]++;
            }
        return;
    }
    int64_t slot = 0;
    for (int64_t d = 0; d < num_destinations; d++)
        for (int64_t v = 0, start = 0; v < num_views; start += sizes[v++]) {
            const int64_t low = d * spans[v], first = slot;
            int64_t at = start, end = start + sizes[v];
            while (at < end) { /* the first entry from `low` on */
                const int64_t middle = at + (end - at) / 2;
                if (indices[middle] < low) at = middle + 1;
                else end = middle;
            }
            for (; at < start + sizes[v] && indices[at] - low < spans[v]; at++, slot++) {
                const int64_t local = indices[at] - low;
                order[slot] = at;
                positions[slot] = (uint16_t)local;
                counts[d * num_blocks + first_block[v] + (local >> BLOCK_BITS)]++;
            }
            places[d * num_views + v] = slot - first;
        }
}

/* A message's positions as positions in their parameters; `starts` and `lengths` of the blocks there. Returns 1 if one
 * lies beyond its block, or there are not `room` of them. */
EXPORT int32_t lowbit_positions(
    const int32_t *counts, const int64_t *starts, const int64_t *lengths, int64_t num_blocks, const uint8_t *wire,
    int64_t room, int64_t *positions
) {
    int64_t at = 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        if (counts[b] < 0 || counts[b] > room - at) return 1;
        for (const int64_t end = at + counts[b]; at < end; at++) {
            uint16_t low;
            memcpy(&low, wire + 2 * at, sizeof low);
            if (low >= lengths[b]) return 1;
            positions[at] = starts[b] + low;
        }
    }
    return at != room;
}

/* residual[indices] = values - sent, 0 where that is not finite. */
EXPORT void lowbit_take_out(
    float *residual, const int64_t *indices, const float *values, const float *sent, int64_t count
) {
    for (int64_t i = 0; i < count; i++) {
        const float left = values[i] - sent[i];
        residual[indices[i]] = isfinite(left) ? left : 0.0f;
    }
}

/* out[position] = alpha * the sum of the parts' values there, part by part. `out` is 0 before; no position comes twice in
 * a part, and `room` has as many numbers as there are entries: every sum is read before one is written. */
EXPORT void lowbit_add_entries(
    float *out, const int64_t *const *indices, const float *const *values, const int64_t *counts, int64_t num_parts,
    float alpha, float *room
) {
    for (int64_t p = 0; p < num_parts; p++)
        for (int64_t i = 0; i < counts[p]; i++) out[indices[p][i]] += values[p][i];
    if (alpha == 1.0f) return;
    float *sum = room;
    for (int64_t p = 0; p < num_parts; p++)
        for (int64_t i = 0; i < counts[p]; i++) *sum++ = alpha * out[indices[p][i]];
    sum = room;
    for (int64_t p = 0; p < num_parts; p++)
        for (int64_t i = 0; i < counts[p]; i++) out[indices[p][i]] = *sum++;
}
