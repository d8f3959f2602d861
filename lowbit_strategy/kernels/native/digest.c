/* The sum of a tensor's 64-bit words, each times a weight of its position. See kernels/digest.py. */
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Bytes [start, stop) in parts of `num_weights` words, each part's sum added to `factor` times the sum so far; a last
 * word that is not whole is filled up with zeros. All modulo 2^64, so that the order of additions does not matter. */
static inline __attribute__((always_inline)) uint64_t weighted(
    const uint8_t *bytes, int64_t start, int64_t stop, const uint64_t *weights, int64_t num_weights, uint64_t factor
) {
    uint64_t total = 0;
    for (int64_t part = start; part < stop; part += 8 * num_weights) {
        const int64_t nbytes = stop - part < 8 * num_weights ? stop - part : 8 * num_weights;
        const uint8_t *from = bytes + part;
        uint64_t sum = 0;
        for (int64_t i = 0; i < nbytes / 8; i++) {
            uint64_t word;
            memcpy(&word, from + 8 * i, sizeof word);
            sum += word * weights[i];
        }
        if (nbytes % 8) {
            uint64_t word = 0;
            memcpy(&word, from + nbytes - nbytes % 8, (size_t)(nbytes % 8));
            sum += word * weights[nbytes / 8];
        }
        total = total * factor + sum;
    }
    return total;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t weighted_avx2(
    const uint8_t *bytes, int64_t start, int64_t stop, const uint64_t *weights, int64_t num_weights, uint64_t factor
) {
    return weighted(bytes, start, stop, weights, num_weights, factor);
}
#endif

EXPORT uint64_t lowbit_digest(
    const char *isa, const uint8_t *bytes, int64_t start, int64_t stop, const uint64_t *weights, int64_t num_weights,
    uint64_t factor
) {
#if defined(__x86_64__)
    if (strcmp(isa, "portable") != 0) /* wider vectors are no faster */
        return weighted_avx2(bytes, start, stop, weights, num_weights, factor);
#else
    (void)isa;
#endif
    return weighted(bytes, start, stop, weights, num_weights, factor);
}
