/* What encoding and decoding share: loops over the segment table, the vectors' random numbers, sums in halves.
 *
 * Included once per instruction set, after that set's vector primitives.
 */
#define NUM_VECTORS (LOWBIT_GROUP / LANES) /* vectors in a group of 32 elements */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE vi vi_magnitude(vf v) { return (vi)v & BITS_ABS; }

/* Counter of element `first` in lane 0, the next elements in the next lanes. */
ALWAYS_INLINE vu dither_counter(int64_t first, uint32_t key) {
    vu counter;
    for (int k = 0; k < LANES; k++) counter[k] = (uint32_t)(first + k) * GOLDEN + key;
    return counter;
}

/* Uniform in [-0.5, 0.5) on a grid of 2^-24. */
ALWAYS_INLINE vf dither(vu x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    x = x ^ x >> 16;
    return vf_from((vi)(x >> 8)) * 0x1p-24f - 0.5f;
}

/* Sum of n numbers, a power of two and at least 32, by adding halves. Overwrites them. */
static inline float tree_sum(float *x, int n) {
    while (n > LANES) {
        n /= 2;
        for (int i = 0; i < n; i += LANES) vf_store(x + i, vf_load(x + i) + vf_load(x + i + n));
    }
    while (n > 1) {
        n /= 2;
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    }
    return x[0];
}

static inline int64_t count_blocks(const struct lowbit_segment *segment, int block_size) {
    return (segment->numel + block_size - 1) / block_size;
}

/* One block of one segment, and where it lies. */
struct block {
    const struct lowbit_segment *segment;
    int64_t first;        /* its first element, counted from the start of the segment */
    int64_t state_block;  /* its scale in the residual */
    int64_t codes, scale; /* bytes from the start of a source */
    int count;            /* elements that are not padding */
};

static inline struct block locate(
    const struct lowbit_format *fmt, const struct lowbit_segment *segment, int64_t num_blocks, int64_t index
) {
    int64_t first = index * fmt->block_size, left = segment->numel - first;
    return (struct block){
        .segment = segment,
        .first = first,
        .state_block = segment->state_offset / fmt->block_size + index,
        .codes = segment->wire_offset + index * fmt->code_nbytes,
        .scale = segment->wire_offset + num_blocks * fmt->code_nbytes + 2 * index,
        .count = left < fmt->block_size ? (int)left : fmt->block_size,
    };
}
