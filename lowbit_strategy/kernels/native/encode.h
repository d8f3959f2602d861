/* Encoding: compensate, scale, quantise, pack, update the residual. One block at a time, through the first cache. */
#include "block.h"
#include "pack.h"

struct magnitudes {
    int32_t h, g; /* bits of the largest |h|; zero if all of g is zero */
};

/* h = g + e, with e dequantised. Without a residual h is g itself and nothing is written. */
ALWAYS_INLINE struct magnitudes compensate(
    const float *g, const int8_t *q, float q_scale, float *e, float *h, int n, const int kind
) {
    vi largest = vi_set1(0), any = vi_set1(0);
    for (int i = 0; i < n; i += LANES) {
        vf gradient = vf_load(g + i), sum = gradient;
        if (kind == RESIDUAL_INT8) {
            vf residual = vf_from(vi_load_i8(q + i)) * vf_set1(q_scale);
            vf_store(e + i, residual);
            sum = gradient + residual;
        }
        if (kind == RESIDUAL_FLOAT32) sum = gradient + vf_load(e + i);
        if (kind != RESIDUAL_NONE) {
            vf_store(h + i, sum);
            any |= (vi)gradient;
        }
        largest = vi_max(largest, vi_magnitude(sum));
    }
    return (struct magnitudes){.h = vi_reduce_max(largest), .g = vi_reduce_or(any) & BITS_ABS};
}

static float rms(const float *h, int n, int count, int32_t largest) {
    float squares[LOWBIT_MAX_BLOCK];
    int exponent = (largest >> 23) - 126; /* frexp's: a power of two near the largest, so that squares stay in range */
    exponent = largest == 0 ? 0 : exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
    vf unit = vf_set1(exp2_int(-exponent));
    for (int i = 0; i < n; i += LANES) {
        vf x = vf_load(h + i) * unit;
        vf_store(squares + i, x * x);
    }
    return __builtin_sqrtf(tree_sum(squares, n) / (float)count) * exp2_int(exponent);
}

static float mean_magnitude(const float *h, int n, int count) {
    float terms[LOWBIT_MAX_BLOCK];
    for (int i = 0; i < n; i += LANES) vf_store(terms + i, (vf)vi_magnitude(vf_load(h + i)));
    return tree_sum(terms, n) / (float)count;
}

/* Mean magnitude of the elements above 0.7 of the mean magnitude. */
static float ternary_scale(const float *h, int n, int count) {
    float terms[LOWBIT_MAX_BLOCK];
    vf threshold = vf_set1(mean_magnitude(h, n, count) * 0.7f);
    vi above = vi_set1(0);
    for (int i = 0; i < n; i += LANES) {
        vf magnitude = (vf)vi_magnitude(vf_load(h + i));
        vmask larger = vf_gt(magnitude, threshold);
        above = vi_count(above, larger);
        vf_store(terms + i, vf_blend(larger, magnitude, vf_set1(0.0f)));
    }
    int total = 0;
    for (int k = 0; k < LANES; k++) total += above[k];
    return tree_sum(terms, n) / (float)(total > 1 ? total : 1);
}

static float raw_scale(const struct lowbit_format *fmt, const float *h, int count, int32_t largest) {
    int n = fmt->block_size;
    switch (fmt->rule) {
    case RULE_RMS: return rms(h, n, count, largest);
    case RULE_MEAN_ABS: return mean_magnitude(h, n, count);
    case RULE_TERNARY: return ternary_scale(h, n, count);
    default: return float_of((uint32_t)largest) * (float)(1.0 / ((1 << (fmt->bits - 1)) - 1));
    }
}

/* To bfloat16 without going below; 0 under the smallest normal number; NaN if it overflows. */
static inline float usable_scale(float raw) {
    float scale = round_up_bfloat16(raw);
    if (bits_of(scale) > BITS_FLT_MAX) return float_of(BITS_NAN);
    return bits_of(scale) < BITS_FLT_MIN ? 0.0f : scale;
}

struct update { /* e' = old * e + new * (h - sent) */
    const float *e;
    float *out;
    float beta_old, beta_new;
};

ALWAYS_INLINE vi apply_update(const struct update *to, int i, vf h, vf sent, vi largest) {
    vf v = vf_set1(to->beta_old) * vf_load(to->e + i) + vf_set1(to->beta_new) * (h - sent);
    vf_store(to->out + i, v);
    return vi_max(largest, vi_magnitude(v));
}

/* Codes round(h / scale + noise) + offset. Returns the bits of the largest updated residual. */
ALWAYS_INLINE int32_t quantize_uniform(
    const float *h, int n, float scale, int qmax, int offset, void *codes, vu counter, const struct update *to,
    const int stochastic, const int update
) {
    const vf inverse = vf_set1(1.0f / scale);
    const vu step = (vu)vi_set1((int32_t)(LANES * GOLDEN));
    vi largest = vi_set1(0);
    for (int i = 0; i < n; i += LOWBIT_GROUP) {
        vi c[NUM_VECTORS];
        for (int k = 0; k < NUM_VECTORS; k++) {
            int at = i + k * LANES;
            vf x = vf_load(h + at), y = x * inverse;
            if (stochastic) {
                y = y + dither(counter);
                counter += step;
            }
            vi q = vi_rint(y);
            if (stochastic) q = vi_min(vi_max(q, vi_set1(-qmax)), vi_set1(qmax)); /* to nearest never leaves the range */
            c[k] = q + vi_set1(offset);
            if (update) largest = apply_update(to, at, x, vf_from(q) * vf_set1(scale), largest);
        }
        store_bytes((uint8_t *)codes + i, c);
    }
    return vi_reduce_max(largest);
}

/* Codes: the number of thresholds below h / scale. Returns the bits of the largest updated residual. */
ALWAYS_INLINE int32_t quantize_fitted(
    const struct lowbit_format *fmt, const float *h, int n, float scale, uint8_t *codes, const struct update *to,
    const int num_thresholds, const int update
) {
    const vf inverse = vf_set1(1.0f / scale);
    vi largest = vi_set1(0);
    for (int i = 0; i < n; i += LOWBIT_GROUP) {
        vi c[NUM_VECTORS];
        for (int k = 0; k < NUM_VECTORS; k++) {
            int at = i + k * LANES;
            vf x = vf_load(h + at), y = x * inverse, level = vf_set1(fmt->levels[0]);
            vi code = vi_set1(0);
            for (int t = 0; t < num_thresholds; t++) {
                vmask above = vf_gt(y, vf_set1(fmt->thresholds[t]));
                code = vi_count(code, above);
                if (update) level = vf_blend(above, vf_set1(fmt->levels[t + 1]), level);
            }
            c[k] = code;
            if (update) largest = apply_update(to, at, x, level * vf_set1(scale), largest);
        }
        store_bytes(codes + i, c);
    }
    return vi_reduce_max(largest);
}

/* A block of scale 0 sends the zero code. */
static int32_t quantize_nothing(const struct lowbit_format *fmt, const float *h, const struct update *to) {
    vf sent = vf_set1((fmt->num_levels ? fmt->levels[fmt->zero_code] : 0.0f) * 0.0f);
    vi largest = vi_set1(0);
    for (int i = 0; i < fmt->block_size; i += LANES) largest = apply_update(to, i, vf_load(h + i), sent, largest);
    return vi_reduce_max(largest);
}

/* The same for each combination that is worth a loop of its own. */
#define FITTED(thresholds) \
    (to ? quantize_fitted(fmt, h, n, scale, codes, to, thresholds, 1) \
        : quantize_fitted(fmt, h, n, scale, codes, to, thresholds, 0))
static int32_t quantize(
    const struct lowbit_format *fmt, const float *h, float scale, uint8_t *codes, const struct update *to,
    int stochastic, vu counter
) {
    int n = fmt->block_size;
    switch (fmt->num_levels) {
    case 0: break;
    case 2: return FITTED(1);
    case 3: return FITTED(2);
    case 4: return FITTED(3);
    default: return FITTED(fmt->num_levels - 1);
    }
    int qmax = fmt->zero_code;
    if (stochastic && to) return quantize_uniform(h, n, scale, qmax, qmax, codes, counter, to, 1, 1);
    if (stochastic) return quantize_uniform(h, n, scale, qmax, qmax, codes, counter, to, 1, 0);
    if (to) return quantize_uniform(h, n, scale, qmax, qmax, codes, counter, to, 0, 1);
    return quantize_uniform(h, n, scale, qmax, qmax, codes, counter, to, 0, 0);
}

static void load_floats(float *out, const void *x, int64_t start, int count, int n, int dtype) {
    if (dtype == DTYPE_FLOAT32) {
        memcpy(out, (const float *)x + start, (size_t)count * 4);
    } else {
        uint16_t raw[LOWBIT_MAX_BLOCK];
        const uint16_t *from = (const uint16_t *)x + start;
        if (count < n) from = memcpy(memset(raw, 0, sizeof raw), from, (size_t)count * 2);
        if (dtype == DTYPE_FLOAT16) load_halves(out, from, n);
        else
            for (int i = 0; i < n; i += LANES) vf_store(out + i, (vf)(vi_load_u16(from + i) << 16));
    }
    memset(out + count, 0, (size_t)(n - count) * 4);
}

/* Nothing is sent for padding. Returns the bits of the largest updated residual of the whole block. */
static int32_t update_padding(const struct update *to, int count, int n) {
    vi largest = vi_set1(0);
    for (int i = count; i < n; i++)
        to->out[i] = to->beta_old * to->e[i] + to->beta_new * (0.0f + to->e[i]);
    for (int i = 0; i < n; i += LANES) largest = vi_max(largest, vi_magnitude(vf_load(to->out + i)));
    return vi_reduce_max(largest);
}

static void store_residual(
    const struct lowbit_format *fmt, const struct lowbit_call *call, const struct block *block, const float *u,
    int32_t largest
) {
    int n = fmt->block_size;
    int8_t *q = (int8_t *)call->residual + block->segment->state_offset + block->first;
    float scale = largest > BITS_FLT_MAX ? float_of(BITS_NAN) : usable_scale(float_of((uint32_t)largest) * (float)(1.0 / 127));
    call->residual_scale[block->state_block] = (uint16_t)(bits_of(scale) >> 16);
    if (!(scale > 0.0f)) {
        memset(q, 0, (size_t)n);
    } else if (call->stochastic_residual) {
        vu counter = dither_counter(block->first, stream_key(call->seed, block->segment->salt, RESIDUAL_STREAM));
        quantize_uniform(u, n, scale, 127, 0, q, counter, NULL, 1, 0);
    } else {
        quantize_uniform(u, n, scale, 127, 0, q, (vu)vi_set1(0), NULL, 0, 0);
    }
}

static void forget_residual(const struct lowbit_format *fmt, const struct lowbit_call *call, const struct block *block) {
    int64_t at = block->segment->state_offset + block->first;
    if (call->residual_kind == RESIDUAL_INT8) {
        memset((int8_t *)call->residual + at, 0, (size_t)fmt->block_size);
        call->residual_scale[block->state_block] = 0;
    } else {
        memset((float *)call->residual + at, 0, (size_t)fmt->block_size * 4);
    }
}

static int encode_block(const struct lowbit_format *fmt, const struct lowbit_call *call, const struct block *block) {
    static const float zeros[LOWBIT_MAX_BLOCK];
    float loaded[LOWBIT_MAX_BLOCK], h_buffer[LOWBIT_MAX_BLOCK], e_buffer[LOWBIT_MAX_BLOCK];
    uint8_t codes[LOWBIT_MAX_BLOCK + PACK_SLACK];
    const int n = fmt->block_size, kind = call->residual_kind;
    const int64_t start = block->segment->x_offset + block->first;

    const float *g = (const float *)call->x + start;
    if (call->x_dtype != DTYPE_FLOAT32 || block->count < n) {
        load_floats(loaded, call->x, start, block->count, n, call->x_dtype);
        g = loaded;
    }
    const float *h = h_buffer;
    struct magnitudes largest;
    struct update update = {.e = e_buffer, .out = h_buffer, .beta_old = call->beta_old, .beta_new = call->beta_new};
    if (kind == RESIDUAL_INT8) {
        const int8_t *q = (const int8_t *)call->residual + block->segment->state_offset + block->first;
        float q_scale = call->reset ? 0.0f : bfloat16_to_float(call->residual_scale[block->state_block]);
        largest = compensate(g, q, q_scale, e_buffer, h_buffer, n, RESIDUAL_INT8);
    } else if (kind == RESIDUAL_FLOAT32) {
        update.out = (float *)call->residual + block->segment->state_offset + block->first;
        update.e = call->reset ? zeros : update.out;
        if (!call->reset && block->count < n) update.e = memcpy(e_buffer, update.out, (size_t)n * 4); /* for padding */
        largest = compensate(g, NULL, 0.0f, (float *)update.e, h_buffer, n, RESIDUAL_FLOAT32);
    } else {
        h = g;
        largest = compensate(g, NULL, 0.0f, NULL, NULL, n, RESIDUAL_NONE);
    }

    float scale = float_of(BITS_NAN);
    if (largest.h <= BITS_FLT_MAX) scale = usable_scale(raw_scale(fmt, h, block->count, largest.h));
    const int finite = scale == scale, idle = kind != RESIDUAL_NONE && largest.g == 0;
    const int keep = kind == RESIDUAL_NONE || idle || !finite;
    if (idle) scale = 0.0f; /* an idle expert's residual waits for its next gradient */
    uint16_t scale_bits = (uint16_t)(bits_of(scale) >> 16);
    memcpy(call->wire + block->scale, &scale_bits, 2);

    int32_t largest_residual = 0;
    if (scale > 0.0f) {
        uint32_t key = call->stochastic ? stream_key(call->seed, block->segment->salt, CODE_STREAM) : 0;
        largest_residual = quantize(
            fmt, h, scale, codes, keep ? NULL : &update, call->stochastic, dither_counter(block->first, key)
        );
    } else {
        memset(codes, fmt->zero_code, (size_t)n);
        if (!keep) largest_residual = quantize_nothing(fmt, h, &update);
    }
    pack(fmt, codes, call->wire + block->codes);

    if (!keep) {
        if (block->count < n) largest_residual = update_padding(&update, block->count, n);
        if (kind == RESIDUAL_INT8) store_residual(fmt, call, block, update.out, largest_residual);
    } else if (call->reset && kind != RESIDUAL_NONE) {
        forget_residual(fmt, call, block);
    }
    return !finite;
}

static int encode(const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t first, int64_t last) {
    int flag = 0;
    for (int64_t s = 0; s < call->num_segments && last > 0; s++) {
        const struct lowbit_segment *segment = call->segments + s;
        int64_t num_blocks = count_blocks(segment, fmt->block_size);
        for (int64_t b = first > 0 ? first : 0; b < num_blocks && b < last; b++) {
            struct block block = locate(fmt, segment, num_blocks, b);
            flag |= encode_block(fmt, call, &block);
        }
        first -= num_blocks;
        last -= num_blocks;
    }
    return flag;
}
