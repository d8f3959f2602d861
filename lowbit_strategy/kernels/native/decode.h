/* Decode-and-sum: sources are added in rank order in float32, a group of vectors at a time, so that sums stay in
 * registers. Constants as in quantize.h: with `parts` = 8 / bits, a group's vectors come from the fields of the same
 * bytes; with parts = 1, from one code per byte.
 */
#define MAX_SOURCES 16 /* added in one go */

/* How codes become values: by arithmetic (uniform grid, ternary), from a table in a register or from one in memory; or
 * from a table in a register by the bits of a block so short that they are one or two words. */
enum { BY_ARITHMETIC, BY_REGISTER, BY_MEMORY, BY_BITS };

/* One block of some sources. */
struct sources {
    vf table[MAX_SOURCES]; /* codebook times scale */
    const uint8_t *codes[MAX_SOURCES];
    float scale[MAX_SOURCES];
    int num;
    vu shift; /* BY_BITS: where a lane's bit is in its word, in the first vector of a block */
    vi upper; /* and whether that is the second word */
};

/* Element i of a block of one-bit codes is bit i / n of byte i % n, of n bytes: 4 or 8. */
static void find_bits(struct sources *from, int n) {
    uint32_t shift[LANES];
    int32_t upper[LANES];
    for (int k = 0; k < LANES; k++) {
        shift[k] = (uint32_t)(8 * (k % n % 4) + k / n);
        upper[k] = k % n < 4 ? 0 : -1;
    }
    memcpy(&from->shift, shift, sizeof shift);
    memcpy(&from->upper, upper, sizeof upper);
}

/* Bits i ... i + LANES of a block in the lowest bits of the lanes; what is above them is not cleared. */
ALWAYS_INLINE vi bits_at(const struct sources *from, const uint8_t *codes, int i, int n) {
    uint32_t words[2];
    memcpy(words, codes, 4);
    memcpy(words + 1, codes + n - 4, 4); /* the same one if there is one */
    vi word = (vi_set1((int32_t)words[1]) & from->upper) | (vi_set1((int32_t)words[0]) & ~from->upper);
    return (vi)((vu)word >> (from->shift + (uint32_t)(i / n)));
}

/* The codebook of a format of few bits, repeated to fill the register. */
static vf codebook_in_register(const struct lowbit_format *fmt) {
    float codebook[LANES];
    for (int k = 0; k < LANES; k++) {
        int code = k & ((1 << fmt->bits) - 1);
        codebook[k] = fmt->codebook_size ? fmt->codebook[code] : (float)(code - fmt->zero_code);
    }
    return vf_load(codebook);
}

/* Values of a group of one source. */
ALWAYS_INLINE void load_values(
    const struct lowbit_format *fmt, const struct sources *from, int w, int i, vf *value, const int how, const int num,
    const int parts
) {
    const int each = num / parts, width = 8 / parts;
    vi code[MAX_GROUP];
#if LOOKUP_BITS
    if (how == BY_BITS) {
        EACH(k) code[k] = bits_at(from, from->codes[w], i + k * LANES, fmt->code_nbytes);
        EACH(k) value[k] = vf_lookup(from->table[w], code[k]);
        return;
    }
#endif
    for (int k = 0; k < each; k++) code[k] = vi_load_u8(from->codes[w] + i + k * LANES);
    for (int k = each; k < num; k++) code[k] = code[k % each] >> (k / each * width);
#if LOOKUP_BITS
    if (how == BY_REGISTER) {
        EACH(k) value[k] = vf_lookup(from->table[w], code[k]);
        return;
    }
#endif
    if (parts > 1) EACH(k) code[k] = code[k] & ((1 << width) - 1);
    if (how == BY_ARITHMETIC) EACH(k) value[k] = vf_from(code[k] - vi_set1(fmt->zero_code));
    else EACH(k) value[k] = vf_gather(fmt->codebook, code[k]);
    EACH(k) value[k] = value[k] * vf_set1(from->scale[w]);
}

/* out = alpha * (before + sum over sources); `before` NULL is zero. */
ALWAYS_INLINE void sum_block(
    const struct lowbit_format *fmt, const struct sources *from, const float *before, float alpha, float *out,
    const int how, const int num, const int parts
) {
    const int n = fmt->block_size;
    for (int i = 0; i < n / parts; i += num / parts * LANES) {
        vf sum[MAX_GROUP], value[MAX_GROUP];
        if (before) EACH(k) sum[k] = vf_load(before + i + place(k, n, num, parts));
        else EACH(k) sum[k] = vf_set1(0.0f);
        for (int w = 0; w < from->num; w++) {
            load_values(fmt, from, w, i, value, how, num, parts);
            EACH(k) sum[k] = sum[k] + value[k];
        }
        EACH(k) sum[k] = sum[k] * vf_set1(alpha);
        EACH(k) vf_store(out + i + place(k, n, num, parts), sum[k]);
    }
}

/* Formats of one plane are read as they lie, others from one code per byte. */
struct reading {
    int parts, how, unpack;
};

static struct reading choose_reading(const struct lowbit_format *fmt) {
    const int bits = fmt->bits, parts = fmt->num_planes == 1 && !fmt->ternary ? 8 / bits : 1;
    const int trits = fmt->ternary && fmt->codebook[0] == -1.0f && fmt->codebook[1] == 0.0f && fmt->codebook[2] == 1.0f;
    const int fits = bits <= LOOKUP_BITS, arithmetic = trits || (!fits && !fmt->codebook_size);
    const int how = arithmetic ? BY_ARITHMETIC : fits ? BY_REGISTER : BY_MEMORY;
    const int wide = fmt->block_size >= (parts == 8 ? 8 : GROUP) * LANES;
    if (wide && parts > 1 && how != BY_MEMORY) return (struct reading){parts, how, 0};
    if (bits == 1 && how == BY_REGISTER && fmt->block_size <= 64) return (struct reading){1, BY_BITS, 0};
    return (struct reading){1, how, bits != 8};
}

/* One block, in a loop of its own for each way of reading. */
ALWAYS_INLINE void sum_block_as(
    struct reading as, const struct lowbit_format *fmt, const struct sources *from, const float *before, float alpha,
    float *out
) {
#define SUM(how, num, parts) sum_block(fmt, from, before, alpha, out, how, num, parts)
    switch (as.how * 16 + as.parts) {
    case BY_ARITHMETIC * 16 + 1: SUM(BY_ARITHMETIC, SMALL_GROUP, 1); break;
    case BY_ARITHMETIC * 16 + 2: SUM(BY_ARITHMETIC, GROUP, 2); break;
    case BY_ARITHMETIC * 16 + 4: SUM(BY_ARITHMETIC, GROUP, 4); break;
    case BY_REGISTER * 16 + 1: SUM(BY_REGISTER, SMALL_GROUP, 1); break;
    case BY_REGISTER * 16 + 2: SUM(BY_REGISTER, GROUP, 2); break;
    case BY_REGISTER * 16 + 4: SUM(BY_REGISTER, GROUP, 4); break;
    case BY_REGISTER * 16 + 8: SUM(BY_REGISTER, 8, 8); break;
    case BY_BITS * 16 + 1: SUM(BY_BITS, SMALL_GROUP, 1); break;
    default: SUM(BY_MEMORY, SMALL_GROUP, 1); break;
    }
#undef SUM
}

/* Sums of a batch over sources [first, first + num), on top of `before`. */
ALWAYS_INLINE void sum_batch(
    struct reading as, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch,
    int64_t first, int num, const float *before, float alpha, float *out
) {
    enum { SIZE = LOWBIT_MAX_BLOCK + PACK_SLACK };
    BUFFER(uint8_t, codes, MAX_SOURCES * SIZE);
    struct sources from;
    const int looked_up = as.how == BY_REGISTER || as.how == BY_BITS;
    const vf codebook = looked_up ? codebook_in_register(fmt) : vf_set1(0.0f);
    from.shift = (vu){0};
    from.upper = (vi){0};
    if (as.how == BY_BITS) find_bits(&from, fmt->code_nbytes);
    const int n = fmt->block_size, stride = as.unpack ? codes_stride(fmt) : fmt->code_nbytes;
    from.num = num;
    const uint8_t *source = call->wire + first * call->wire_row_stride;
    if (as.unpack)
        for (int w = 0; w < num; w++)
            unpack(fmt, source + w * call->wire_row_stride + batch->codes, codes + w * SIZE, batch->num_blocks);
    for (int b = 0; b < batch->num_blocks; b++) {
        for (int w = 0; w < num; w++) {
            const uint8_t *wire = source + w * call->wire_row_stride;
            uint16_t scale_bits;
            memcpy(&scale_bits, wire + batch->scales + 2 * b, 2);
            from.scale[w] = bfloat16_to_float(scale_bits);
            from.table[w] = codebook * vf_set1(from.scale[w]);
            from.codes[w] = (as.unpack ? codes + w * SIZE : wire + batch->codes) + b * stride;
        }
        sum_block_as(as, fmt, &from, before ? before + b * n : NULL, alpha, out + b * n);
    }
}

static void store_floats(const struct lowbit_call *call, int64_t start, const float *total, int count) {
    BUFFER(uint16_t, narrow, LOWBIT_MAX_BLOCK);
    if (call->x_dtype == DTYPE_FLOAT32) {
        memcpy((float *)call->x + start, total, (size_t)count * 4);
        return;
    }
    int padded = (count + LOWBIT_MIN_BLOCK - 1) / LOWBIT_MIN_BLOCK * LOWBIT_MIN_BLOCK;
    if (call->x_dtype == DTYPE_FLOAT16) store_halves(narrow, total, padded);
    else
        for (int i = 0; i < padded; i++) narrow[i] = float_to_bfloat16(total[i]);
    memcpy((uint16_t *)call->x + start, narrow, (size_t)count * 2);
}

static void decode_batch(const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch) {
    BUFFER(float, total, LOWBIT_MAX_BLOCK);
    const struct reading as = choose_reading(fmt);
    const int64_t start = batch->segment->x_offset + batch->first;
    const int direct = call->x_dtype == DTYPE_FLOAT32 && batch->count == batch->num_blocks * fmt->block_size;
    float *out = direct ? (float *)call->x + start : total;
    int64_t first = 0;
    for (; call->num_sources - first > MAX_SOURCES; first += MAX_SOURCES)
        sum_batch(as, fmt, call, batch, first, MAX_SOURCES, first ? total : NULL, 1.0f, total);
    sum_batch(
        as, fmt, call, batch, first, (int)(call->num_sources - first), first ? total : NULL, call->alpha, out
    );
    if (!direct) store_floats(call, start, total, batch->count);
}

static void decode_blocks(
    const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t first, int64_t last
) {
    FOR_EACH_BATCH(fmt, call, first, last, decode_batch(fmt, call, &batch))
}
