/* Decode-and-sum: sources are added in rank order in float32, a block at a time, in the first cache. */

enum { STORE, ADD }; /* the first source, later ones */

ALWAYS_INLINE void accumulate(float *total, vf value, const int mode) {
    vf_store(total, (mode == ADD ? vf_load(total) : vf_set1(0.0f)) + value);
}

/* Codes of one plane of 1, 2 or 4 bits, through a table of scaled levels in one register. */
#if LOOKUP_BITS
ALWAYS_INLINE void add_lookup(
    const struct lowbit_format *fmt, const uint8_t *packed, float scale, float *total, const int width, const int mode
) {
    float entries[LANES];
    const int n = fmt->block_size * width / 8, mask = (1 << width) - 1;
    for (int k = 0; k < LANES; k++) {
        int code = k & mask;
        entries[k] = (fmt->num_levels ? fmt->levels[code] : (float)(code - fmt->zero_code)) * scale;
    }
    const vf table = vf_load(entries);
    for (int j = 0; j < n; j += LANES) {
        vi bytes = vi_load_u8(packed + j);
        for (int k = 0; k < 8 / width; k++) accumulate(total + k * n + j, vf_lookup(table, bytes >> (k * width)), mode);
    }
}
#endif

/* Codes of one plane of 4 or 8 bits of the uniform grid, by arithmetic. */
ALWAYS_INLINE void add_uniform(
    const struct lowbit_format *fmt, const uint8_t *packed, float scale, float *total, const int width, const int mode
) {
    const int n = fmt->block_size * width / 8;
    for (int j = 0; j < n; j += LANES) {
        vi bytes = vi_load_u8(packed + j);
        for (int k = 0; k < 8 / width; k++) {
            vi code = (bytes >> (k * width)) & ((1 << width) - 1);
            accumulate(total + k * n + j, vf_from(code - fmt->zero_code) * vf_set1(scale), mode);
        }
    }
}

/* Any format, through one code a byte. */
ALWAYS_INLINE void add_unpacked(
    const struct lowbit_format *fmt, const uint8_t *packed, float scale, float *total, const int mode
) {
    BUFFER(uint8_t, codes, LOWBIT_MAX_BLOCK + PACK_SLACK);
    unpack(fmt, packed, codes);
    if (!fmt->num_levels) {
        for (int i = 0; i < fmt->block_size; i += LANES)
            accumulate(total + i, vf_from(vi_load_u8(codes + i) - fmt->zero_code) * vf_set1(scale), mode);
        return;
    }
    BUFFER(float, values, LOWBIT_MAX_BLOCK);
    for (int i = 0; i < fmt->block_size; i++) values[i] = fmt->levels[codes[i]];
    for (int i = 0; i < fmt->block_size; i += LANES) accumulate(total + i, vf_load(values + i) * vf_set1(scale), mode);
}

ALWAYS_INLINE void add_source(
    const struct lowbit_format *fmt, const uint8_t *packed, float scale, float *total, const int mode
) {
    const int bits = fmt->bits, size = fmt->block_size, uniform = fmt->num_levels == 0;
    const int whole = fmt->num_planes == 1 && fmt->rule != RULE_TERNARY && size * bits / 8 >= LANES;
#if LOOKUP_BITS >= 4
    if (whole && bits == 4) { add_lookup(fmt, packed, scale, total, 4, mode); return; }
#endif
#if LOOKUP_BITS
    if (whole && bits == 2) { add_lookup(fmt, packed, scale, total, 2, mode); return; }
    if (whole && bits == 1) { add_lookup(fmt, packed, scale, total, 1, mode); return; }
#endif
    if (whole && uniform && bits == 4) { add_uniform(fmt, packed, scale, total, 4, mode); return; }
    if (whole && uniform && bits == 8) { add_uniform(fmt, packed, scale, total, 8, mode); return; }
    add_unpacked(fmt, packed, scale, total, mode);
}

static void store_floats(const struct lowbit_call *call, int64_t start, const float *total, int count) {
    BUFFER(uint16_t, narrow, LOWBIT_MAX_BLOCK);
    if (call->x_dtype == DTYPE_FLOAT32) {
        memcpy((float *)call->x + start, total, (size_t)count * 4);
        return;
    }
    int padded = (count + LOWBIT_GROUP - 1) / LOWBIT_GROUP * LOWBIT_GROUP;
    if (call->x_dtype == DTYPE_FLOAT16) store_halves(narrow, total, padded);
    else
        for (int i = 0; i < padded; i++) narrow[i] = float_to_bfloat16(total[i]);
    memcpy((uint16_t *)call->x + start, narrow, (size_t)count * 2);
}

static void decode_batch(const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch) {
    BUFFER(float, total, LOWBIT_MAX_BLOCK);
    const int n = fmt->block_size, all = batch->num_blocks * n;
    if (call->num_sources == 0) memset(total, 0, sizeof total);
    for (int64_t w = 0; w < call->num_sources; w++) {
        const uint8_t *source = call->wire + w * call->wire_stride, *codes = source + batch->codes;
        for (int b = 0; b < batch->num_blocks; b++, codes += fmt->code_nbytes) {
            uint16_t scale_bits;
            memcpy(&scale_bits, source + batch->scales + 2 * b, 2);
            float scale = bfloat16_to_float(scale_bits);
            if (w == 0) add_source(fmt, codes, scale, total + b * n, STORE);
            else add_source(fmt, codes, scale, total + b * n, ADD);
        }
    }
    for (int i = 0; i < all; i += LANES) vf_store(total + i, vf_load(total + i) * vf_set1(call->alpha));
    store_floats(call, batch->segment->x_offset + batch->first, total, batch->count);
}

static void decode_sum(const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t first, int64_t last) {
    FOR_EACH_BATCH(fmt, call, first, last, decode_batch(fmt, call, &batch))
}
