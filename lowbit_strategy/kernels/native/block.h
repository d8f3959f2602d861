/* What encoding and decoding share: batches of blocks of the segment table, and vectors of random numbers.
 *
 * Included once per instruction set, after that set's vector primitives.
 */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Loops over the elements of a block take groups of vectors and do one operation on all of a group before the next:
 * operands are then ready when they are asked for, and the processor's queues do not fill with what waits. */
#define GROUP 4
#define SMALL_GROUP (LANES == 16 ? 2 : 4) /* for blocks of 32 elements */
#define MAX_GROUP 8
#define EACH(k) for (int k = 0; k < num; k++)

/* Blocks pass through the stages of a kernel in batches: what one block's stage waits for (a sum over lanes, a
 * division) then overlaps with the work of its neighbors, and buffers still fit the first cache. */
#define BATCH_ELEMENTS 2048
#define BATCH_BLOCKS (BATCH_ELEMENTS / LOWBIT_MIN_BLOCK)

/* A buffer on cache lines of its own; a line between it and the next one keeps the same elements of two buffers from
 * lying a multiple of 4096 bytes apart, where processors take a load for one of the store before it. */
#define BUFFER(type, name, size) type name[(size) + 64 / sizeof(type)] __attribute__((aligned(64)))

/* Neighboring blocks of one segment, and where they lie. */
struct batch {
    const struct lowbit_segment *segment;
    int64_t first;       /* first element, counted from the start of the segment */
    int64_t state_block; /* scale of the first block in the residual */
    int64_t codes;       /* first byte of the codes in a source */
    int64_t scales;      /* and of the scales */
    int num_blocks;
    int count; /* elements that are not padding */
};

/* As many of the segment's blocks [first, last) as a batch takes. */
static inline struct batch locate(
    const struct lowbit_format *fmt, const struct lowbit_segment *segment, int64_t first, int64_t last,
    int64_t num_blocks
) {
    int64_t size = fmt->block_size, most = size < BATCH_ELEMENTS ? BATCH_ELEMENTS / size : 1;
    int64_t taken = last - first < most ? last - first : most, left = segment->numel - first * size;
    return (struct batch){
        .segment = segment,
        .first = first * size,
        .state_block = segment->state_offset / size + first,
        .codes = segment->wire_offset + first * fmt->code_nbytes,
        .scales = segment->wire_offset + num_blocks * fmt->code_nbytes + 2 * first,
        .num_blocks = (int)taken,
        .count = (int)(left < taken * size ? left : taken * size),
    };
}

/* Statement for each batch of blocks [first, last), counted through all segments in order. */
#define FOR_EACH_BATCH(fmt, call, first, last, statement) \
    for (int64_t s = 0, before = 0; s < (call)->num_segments && before < (last); s++) { \
        const struct lowbit_segment *segment = (call)->segments + s; \
        const int64_t size = (fmt)->block_size, num_blocks = (segment->numel + size - 1) / size; \
        const int64_t stop = (last)-before < num_blocks ? (last)-before : num_blocks; \
        for (int64_t b = (first) > before ? (first)-before : 0; b < stop;) { \
            struct batch batch = locate(fmt, segment, b, stop, num_blocks); \
            b += batch.num_blocks; \
            statement; \
        } \
        before += num_blocks; \
    }

/* Counter of element `first` in lane 0, the next elements in the next lanes. */
ALWAYS_INLINE vu dither_counter(int64_t first, uint32_t key) {
    vu lanes;
    for (uint32_t k = 0; k < LANES; k++) lanes[k] = k * GOLDEN;
    return lanes + ((uint32_t)first * GOLDEN + key);
}

/* To each of `num` vectors, numbers uniform in [-0.5, 0.5) on a grid of 2^-24: 24 bits of the counters' hash. */
ALWAYS_INLINE void add_dither(vf *x, vu *hash, const int num) {
    EACH(k) hash[k] = (hash[k] ^ hash[k] >> 16) * 0x7FEB352Du;
    EACH(k) hash[k] = (hash[k] ^ hash[k] >> 15) * 0x846CA68Bu;
    EACH(k) hash[k] = hash[k] ^ hash[k] >> 16 ^ 0x80000000u; /* from unsigned to signed: 0.5 less */
    EACH(k) x[k] = vf_add_exact_product(vf_from((vi)hash[k] >> 8), vf_set1(0x1p-24f), x[k]);
}
