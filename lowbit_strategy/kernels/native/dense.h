/* Floats that are sent as they are, or rounded to bfloat16. Included once per instruction set, after decode.h: plain
 * loops, which the compiler makes vectors of.
 */
#define DENSE_PIECE LOWBIT_MAX_BLOCK /* what passes through a buffer at a time */

/* Elements [at, at + count) of a segment. */
struct piece {
    const struct lowbit_segment *segment;
    int64_t at;
    int count;
};

/* Statement for each piece of elements [first, last), counted through all segments in order. */
#define FOR_EACH_PIECE(call, first, last, statement) \
    for (int64_t s = 0, before = 0; s < (call)->num_segments && before < (last); s++) { \
        const struct lowbit_segment *segment = (call)->segments + s; \
        const int64_t stop = (last)-before < segment->numel ? (last)-before : segment->numel; \
        for (int64_t at = (first) > before ? (first)-before : 0; at < stop;) { \
            const int count = (int)(stop - at < DENSE_PIECE ? stop - at : DENSE_PIECE); \
            const struct piece piece = {segment, at, count}; \
            statement; \
            at += count; \
        } \
        before += segment->numel; \
    }

static inline int is_narrow(const struct lowbit_call *call) { return call->wire_dtype == DTYPE_BFLOAT16; }

static inline uint8_t *wire_of(const struct lowbit_call *call, const struct piece *piece) {
    return call->wire + piece->segment->wire_offset + piece->at * (is_narrow(call) ? 2 : 4);
}

/* Whether all of `count` numbers, inf and NaN being those whose magnitude's bits are the largest, are finite. */
static int all_finite(const float *x, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(x[i]) & BITS_ABS;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest <= BITS_FLT_MAX;
}

static int all_finite_narrow(const uint16_t *x, int count) {
    uint16_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7FFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < 0x7F80;
}

static int whole_vectors(int count) { return (count + LOWBIT_MIN_BLOCK - 1) / LOWBIT_MIN_BLOCK * LOWBIT_MIN_BLOCK; }

/* Returns whether something that is sent is not finite. */
static int dense_encode_piece(const struct lowbit_call *call, struct piece piece) {
    BUFFER(float, floats, DENSE_PIECE);
    BUFFER(uint16_t, narrow, DENSE_PIECE);
    const int64_t start = piece.segment->x_offset + piece.at;
    uint8_t *wire = wire_of(call, &piece);
    if (is_narrow(call) && call->x_dtype == DTYPE_BFLOAT16) {
        memcpy(narrow, (const uint16_t *)call->x + start, (size_t)piece.count * 2);
    } else {
        load_floats(floats, call->x, start, piece.count, whole_vectors(piece.count), call->x_dtype);
        if (!is_narrow(call)) {
            memcpy(wire, floats, (size_t)piece.count * 4);
            return !all_finite(floats, piece.count);
        }
        for (int i = 0; i < piece.count; i++) narrow[i] = float_to_bfloat16(floats[i]);
    }
    memcpy(wire, narrow, (size_t)piece.count * 2);
    return !all_finite_narrow(narrow, piece.count);
}

/* total = the first source, or total + a later one. The wire may be aligned to nothing. */
static void add_floats(float *total, const uint8_t *wire, int count, int narrow, int add) {
    BUFFER(uint8_t, bytes, 4 * DENSE_PIECE);
    memcpy(bytes, wire, (size_t)count * (narrow ? 2 : 4));
    const float *wide = (const float *)bytes;
    const uint16_t *halves = (const uint16_t *)bytes;
    if (narrow && add) for (int i = 0; i < count; i++) total[i] += bfloat16_to_float(halves[i]);
    else if (narrow) for (int i = 0; i < count; i++) total[i] = bfloat16_to_float(halves[i]);
    else if (add) for (int i = 0; i < count; i++) total[i] += wide[i];
    else memcpy(total, wide, (size_t)count * 4);
}

static void dense_decode_piece(const struct lowbit_call *call, struct piece piece) {
    BUFFER(float, total, DENSE_PIECE);
    const int padded = whole_vectors(piece.count);
    const uint8_t *wire = wire_of(call, &piece);
    for (int64_t w = 0; w < call->num_sources; w++)
        add_floats(total, wire + w * call->wire_row_stride, piece.count, is_narrow(call), w > 0);
    for (int i = 0; i < piece.count; i++) total[i] *= call->alpha;
    memset(total + piece.count, 0, (size_t)(padded - piece.count) * 4);
    store_floats(call, piece.segment->x_offset + piece.at, total, piece.count);
}

/* What the table of kernels has: for blocks, and for floats as they are. */
static int encode(const struct lowbit_call *call, int64_t first, int64_t last) {
    int flag = 0;
    if (call->format) return encode_blocks(call->format, call, first, last);
    FOR_EACH_PIECE(call, first, last, flag |= dense_encode_piece(call, piece))
    return flag;
}

static void decode_sum(const struct lowbit_call *call, int64_t first, int64_t last) {
    if (call->format) decode_blocks(call->format, call, first, last);
    else FOR_EACH_PIECE(call, first, last, dense_decode_piece(call, piece))
}
