/* Encoding, with the LoCo step: compensate, scale, quantize, pack, update the residual. */
#include "block.h"
#include "scale.h"
#include "quantize.h"
#include "pack.h"

/* A batch on its way. */
struct encoding {
    const float *g, *e; /* the caller's memory where that can be used as it is, else the buffers */
    const int8_t *q;
    float *updated;
    int32_t keep[BATCH_BLOCKS];             /* the residual stays as it is */
    BUFFER(float, q_scale, BATCH_BLOCKS);
    BUFFER(int32_t, largest, BATCH_BLOCKS); /* bits of max |h|, later of max |e'| */
    BUFFER(float, scale, BATCH_BLOCKS);
    BUFFER(float, inverse, BATCH_BLOCKS);
    BUFFER(float, g_buffer, LOWBIT_MAX_BLOCK);
    BUFFER(float, h_buffer, LOWBIT_MAX_BLOCK); /* for scales that are sums */
    BUFFER(float, e_buffer, LOWBIT_MAX_BLOCK);
    BUFFER(uint8_t, codes, LOWBIT_MAX_BLOCK + PACK_SLACK);
};

ALWAYS_INLINE struct source source_of(const struct encoding *at, int block, int n) {
    return (struct source){at->g + block * n, at->e + block * n, at->q + block * n, at->q_scale[block]};
}

/* Into the cache what a block of the next batch is read from. Without a residual the processor's own prefetching keeps
 * up. */
ALWAYS_INLINE void prefetch_next(const struct encoding *to, int block, int n, const int kind) {
    const int next = BATCH_ELEMENTS + block * n;
    if (kind != RESIDUAL_INT8) return;
    for (int i = 0; i < n; i += 64 / 4) __builtin_prefetch(to->g + next + i, 0);
    for (int i = 0; i < n; i += 64) __builtin_prefetch(to->q + next + i, 1);
}

/* `count` numbers as float32, and zeros up to n. */
static void load_floats(float *out, const void *x, int64_t start, int count, int n, int dtype) {
    if (dtype == DTYPE_FLOAT32) {
        memcpy(out, (const float *)x + start, (size_t)count * 4);
    } else {
        uint16_t padded[LOWBIT_MAX_BLOCK];
        const uint16_t *raw = (const uint16_t *)x + start;
        if (count < n) raw = memcpy(memset(padded, 0, (size_t)n * 2), raw, (size_t)count * 2);
        if (dtype == DTYPE_FLOAT16) load_halves(out, raw, n);
        else
            for (int i = 0; i < n; i += LANES) vf_store(out + i, (vf)(vi_load_u16(raw + i) << 16));
    }
    memset(out + count, 0, (size_t)(n - count) * 4);
}

static void open_batch(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch
) {
    static const float zeros[LOWBIT_MAX_BLOCK];
    const int n = fmt->block_size, all = batch->num_blocks * n;
    const int64_t start = batch->segment->x_offset + batch->first, state = batch->segment->state_offset + batch->first;
    to->g = (const float *)call->x + start;
    if (call->x_dtype != DTYPE_FLOAT32 || batch->count < all) {
        load_floats(to->g_buffer, call->x, start, batch->count, all, call->x_dtype);
        to->g = to->g_buffer;
    }
    to->e = to->updated = to->e_buffer;
    to->q = (const int8_t *)call->residual + state;
    if (call->residual_kind == RESIDUAL_INT8) {
        for (int b = 0; b < batch->num_blocks; b++)
            to->q_scale[b] = call->reset ? 0.0f : bfloat16_to_float(call->residual_scale[batch->state_block + b]);
    } else if (call->residual_kind == RESIDUAL_FLOAT32) {
        to->updated = (float *)call->residual + state;
        if (call->reset) to->e = zeros;
        else if (batch->count < all) to->e = memcpy(to->e_buffer, to->updated, (size_t)all * 4); /* for the padding */
        else to->e = to->updated;
    }
}

/* Bits of the largest |h| of a block; h itself where the scale is a sum over it. */
ALWAYS_INLINE void survey_block(struct encoding *to, int b, int n, const int keep_h, const int kind, const int num) {
    const struct source from = source_of(to, b, n);
    vi largest[MAX_GROUP] = {{0}};
    for (int i = 0; i < n; i += num * LANES) {
        vf h[MAX_GROUP], e[MAX_GROUP];
        load_group(&from, i, n, h, e, kind, num, 1);
        if (keep_h) EACH(k) vf_store(to->h_buffer + b * n + i + k * LANES, h[k]);
        EACH(k) largest[k] = vi_max(largest[k], vi_magnitude(h[k]));
    }
    to->largest[b] = reduce_group(largest, num);
}

ALWAYS_INLINE void survey(
    struct encoding *to, int num_blocks, int n, const int keep_h, const int kind, const int num
) {
    for (int b = 0; b < num_blocks; b++) survey_block(to, b, n, keep_h, kind, num);
}

/* Sum of h * h over a block, added in the order of `sum_squares`. */
ALWAYS_INLINE float block_energy(const struct source *from, int n, const int kind, const int parts) {
    BUFFER(float, partial, LOWBIT_MAX_BLOCK / 4);
    vf h[4], e[4], sum = vf_set1(0.0f);
    for (int i = 0; i < n / parts; i += LANES) {
        load_group(from, i, n, h, e, kind, parts, parts);
        for (int k = 0; k < parts; k++) h[k] = h[k] * h[k];
        sum = parts == 4 ? (h[0] + h[2]) + (h[1] + h[3]) : h[0] + h[1];
        if (n > parts * LANES) vf_store(partial + i, sum);
    }
    return n > parts * LANES ? sum_halves(partial, n / parts) : vf_sum_halves(sum);
}

/* Root mean squares of a batch's blocks, in one look at them: squares that leave float32's range, or come near to where
 * they would lose bits, are rare, and their blocks are done again with care. */
ALWAYS_INLINE void rms_scales(
    struct encoding *to, const struct lowbit_format *fmt, const struct batch *batch, const int kind, const int parts
) {
    const int n = fmt->block_size;
    for (int b = 0; b < batch->num_blocks; b++) {
        const struct source from = source_of(to, b, n);
        const int count = batch->count - b * n < n ? batch->count - b * n : n;
        const float energy = block_energy(&from, n, kind, parts);
        to->largest[b] = 0; /* known to be finite */
        if (energy >= 0x1p-60f && energy <= 0x1p100f) {
            to->scale[b] = __builtin_sqrtf(energy / (float)count);
        } else {
            survey_block(to, b, n, 1, kind, 1);
            to->scale[b] = sum_scale(fmt, to->h_buffer + b * n, count, to->largest[b]);
        }
    }
}

/* Whether all of g is zero, which its first element mostly denies. */
ALWAYS_INLINE int is_idle(const float *g, int n) {
    for (int i = 0; i < n; i++)
        if (g[i] != 0.0f) return 0; /* NaN too */
    return 1;
}

/* Scales of the batch, to the wire too. Returns whether a block is not finite. */
static int scale_batch(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch
) {
    const int n = fmt->block_size, loco = call->residual_kind != RESIDUAL_NONE;
    int flag = 0;
    if (fmt->rule == RULE_ABSMAX) {
        absmax_scales(to->scale, to->inverse, to->largest, batch->num_blocks, fmt->top, fmt->max_scale, 0);
    } else {
        for (int b = 0; fmt->rule != RULE_RMS && b < batch->num_blocks; b++) {
            int count = batch->count - b * n < n ? batch->count - b * n : n;
            to->scale[b] = sum_scale(fmt, to->h_buffer + b * n, count, to->largest[b]);
        }
        round_scales(to->scale, to->inverse, to->largest, batch->num_blocks, fmt->max_scale, 0);
    }
    for (int b = 0; b < batch->num_blocks; b++) {
        int finite = to->scale[b] == to->scale[b], idle = loco && is_idle(to->g + b * n, n);
        flag |= !finite;
        to->keep[b] = !loco || idle || !finite;
        if (idle) to->scale[b] = 0.0f; /* an idle expert's residual waits for its next gradient */
        uint16_t bits = (uint16_t)(bits_of(to->scale[b]) >> 16);
        memcpy(call->wire + batch->scales + 2 * b, &bits, 2);
    }
    return flag;
}

/* Codes of a batch to `out`, each block `stride` bytes behind the last, and the updated residual. `num_values`: 0 is
 * the uniform grid, -1 the format's own number, FLOATS those of E2M1. */
enum { FLOATS = -2 };

ALWAYS_INLINE void quantize_batch(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch,
    uint8_t *out, int stride, const int num_values, const int stochastic, const int kind, const int num, const int parts
) {
    const int n = fmt->block_size, qmax = fmt->zero_code;
    const int thresholds = (num_values < 0 ? fmt->codebook_size : num_values) - 1;
    const vu counter = dither_counter(batch->first, stream_key(call->seed, batch->segment->salt, CODE_STREAM));
    int nothing = fmt->zero_code;
    for (int p = 1; p < parts; p++) nothing |= fmt->zero_code << (8 / parts * p);
    for (int b = 0; b < batch->num_blocks; b++, out += stride) {
        const float scale = to->scale[b], inverse = to->inverse[b];
        const struct source from = source_of(to, b, n);
        const struct update apply = {to->updated + b * n, call->beta_old, call->beta_new};
        prefetch_next(to, b, n, kind);
        if (!(scale > 0.0f)) {
            memset(out, nothing, (size_t)(n / parts));
            to->largest[b] = kind != RESIDUAL_NONE && !to->keep[b] ? quantize_nothing(fmt, &from, &apply, kind) : 0;
        } else if (num_values == 0 || num_values == FLOATS) {
            vu start = counter + (uint32_t)(b * n) * GOLDEN;
            to->largest[b] = quantize_grid(
                &from, n, scale, inverse, qmax, qmax, out, start, &apply, num_values == FLOATS, stochastic, kind, num,
                parts
            );
        } else if (num_values == 2 && num < parts) {
            to->largest[b] = quantize_signs(fmt, &from, scale, inverse, out, &apply, kind, num);
        } else {
            to->largest[b] = quantize_fitted(fmt, &from, scale, inverse, out, &apply, thresholds, kind, num, parts);
        }
    }
}

/* Codes to the wire: packed on the way where the format allows, else by way of one code per byte. */
ALWAYS_INLINE void quantize(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch,
    const int kind
) {
    const int n = fmt->block_size, num_values = fmt->codebook_size;
    const int stochastic = call->stochastic, nbytes = fmt->code_nbytes;
    uint8_t *wire = call->wire + batch->codes;
    const int bits = fmt->num_planes == 1 && !fmt->ternary ? fmt->bits : 0;
    const int wide = n >= GROUP * LANES;
#define RUN(out, stride, ...) quantize_batch(to, fmt, call, batch, out, stride, __VA_ARGS__)
    if (wide && !num_values && !stochastic && bits == 4) RUN(wire, nbytes, 0, 0, kind, GROUP, 2);
    else if (wide && !num_values && !stochastic && bits == 2) RUN(wire, nbytes, 0, 0, kind, GROUP, 4);
    else if (wide && !num_values && !stochastic && bits == 8) RUN(wire, nbytes, 0, 0, kind, GROUP, 1);
    else if (wide && !num_values && bits == 4) RUN(wire, nbytes, 0, 1, kind, GROUP, 2);
    else if (wide && fmt->e2m1) RUN(wire, nbytes, FLOATS, 0, kind, GROUP, 2);
    else if (wide && num_values == 4 && bits == 2) RUN(wire, nbytes, 4, 0, kind, GROUP, 4);
    else if (n >= 8 * LANES && num_values == 2 && bits == 1) RUN(wire, nbytes, 2, 0, kind, 8, 8);
    else if (n < 8 * LANES && num_values == 2 && bits == 1) {
        if (n == 2 * LANES) RUN(to->codes, nbytes, 2, 0, kind, 2, 8);
        else RUN(to->codes, nbytes, 2, 0, kind, 4, 8);
        pack_bits(to->codes, wire, n, batch->num_blocks);
    } else {
        const int stride = codes_stride(fmt);
        if (wide && !num_values && stochastic) RUN(to->codes, stride, 0, 1, kind, GROUP, 1);
        else if (wide && !num_values) RUN(to->codes, stride, 0, 0, kind, GROUP, 1);
        else if (wide && num_values == 3) RUN(to->codes, stride, 3, 0, kind, GROUP, 1);
        else if (!num_values && stochastic) RUN(to->codes, stride, 0, 1, kind, SMALL_GROUP, 1);
        else if (!num_values) RUN(to->codes, stride, 0, 0, kind, SMALL_GROUP, 1);
        else RUN(to->codes, stride, -1, 0, kind, SMALL_GROUP, 1);
        pack(fmt, to->codes, wire, batch->num_blocks);
    }
#undef RUN
}

/* Nothing is sent for the padding of the last block, regardless of its codes. */
static void update_padding(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch
) {
    const int n = fmt->block_size, last = batch->num_blocks - 1;
    if (batch->count == batch->num_blocks * n || to->keep[last]) return;
    for (int i = batch->count; i < batch->num_blocks * n; i++) {
        float e = call->residual_kind == RESIDUAL_INT8 ? to->q[i] * to->q_scale[last] : to->e[i];
        to->updated[i] = call->beta_old * e + call->beta_new * (0.0f + e);
    }
    vi largest = vi_set1(0);
    for (int i = 0; i < n; i += LANES) largest = vi_max(largest, vi_magnitude(vf_load(to->updated + last * n + i)));
    to->largest[last] = vi_reduce_max(largest);
}

/* The updated residual as int8. */
ALWAYS_INLINE void store_batch(
    struct encoding *to, const struct lowbit_call *call, const struct batch *batch, int n, const int stochastic,
    const int num
) {
    int8_t *q = (int8_t *)call->residual + batch->segment->state_offset + batch->first;
    const vu counter = dither_counter(batch->first, stream_key(call->seed, batch->segment->salt, RESIDUAL_STREAM));
    absmax_scales(to->scale, to->inverse, to->largest, batch->num_blocks, 127, RESIDUAL_MAX_SCALE, 1);
    for (int b = 0; b < batch->num_blocks; b++)
        if (!to->keep[b]) call->residual_scale[batch->state_block + b] = (uint16_t)(bits_of(to->scale[b]) >> 16);
    for (int b = 0, end; b < batch->num_blocks; b = end) {
        for (end = b; end < batch->num_blocks && !to->keep[end] && to->scale[end] > 0.0f;) end++;
        if (end > b) {
            vu start = counter + (uint32_t)(b * n) * GOLDEN;
            quantize_residuals(to->updated + b * n, end - b, n, to->inverse + b, q + b * n, start, stochastic, num);
        } else {
            if (!to->keep[b]) memset(q + b * n, 0, (size_t)n);
            end++;
        }
    }
}

static void forget(const struct lowbit_call *call, int64_t state, int64_t block, int n) {
    if (call->residual_kind == RESIDUAL_INT8) {
        memset((int8_t *)call->residual + state, 0, (size_t)n);
        call->residual_scale[block] = 0;
    } else {
        memset((float *)call->residual + state, 0, (size_t)n * 4);
    }
}

ALWAYS_INLINE int encode_batch(
    const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch, const int kind
) {
    struct encoding encoding, *to = &encoding;
    const int n = fmt->block_size, wide = n >= GROUP * LANES;
    memset(to->scale, 0, sizeof to->scale); /* lanes behind the last block are computed with */
    memset(to->largest, 0, sizeof to->largest);
    open_batch(to, fmt, call, batch);
    if (fmt->rule == RULE_RMS && n == 2 * LANES) rms_scales(to, fmt, batch, kind, 2);
    else if (fmt->rule == RULE_RMS) rms_scales(to, fmt, batch, kind, 4);
    else if (fmt->rule != RULE_ABSMAX) survey(to, batch->num_blocks, n, 1, kind, SMALL_GROUP);
    else if (wide) survey(to, batch->num_blocks, n, 0, kind, GROUP);
    else survey(to, batch->num_blocks, n, 0, kind, SMALL_GROUP);
    int flag = scale_batch(to, fmt, call, batch);
    quantize(to, fmt, call, batch, kind);
    if (kind == RESIDUAL_NONE) return flag;

    update_padding(to, fmt, call, batch);
    if (kind == RESIDUAL_INT8) {
        if (call->stochastic_residual && wide) store_batch(to, call, batch, n, 1, GROUP);
        else if (call->stochastic_residual) store_batch(to, call, batch, n, 1, SMALL_GROUP);
        else if (wide) store_batch(to, call, batch, n, 0, GROUP);
        else store_batch(to, call, batch, n, 0, SMALL_GROUP);
    }
    for (int b = 0; call->reset && b < batch->num_blocks; b++)
        if (to->keep[b]) forget(call, batch->segment->state_offset + batch->first + b * n, batch->state_block + b, n);
    return flag;
}

static int encode_blocks(
    const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t first, int64_t last
) {
    int flag = 0;
    switch (call->residual_kind) {
    case RESIDUAL_INT8:
        FOR_EACH_BATCH(fmt, call, first, last, flag |= encode_batch(fmt, call, &batch, RESIDUAL_INT8))
        break;
    case RESIDUAL_FLOAT32:
        FOR_EACH_BATCH(fmt, call, first, last, flag |= encode_batch(fmt, call, &batch, RESIDUAL_FLOAT32))
        break;
    default:
        FOR_EACH_BATCH(fmt, call, first, last, flag |= encode_batch(fmt, call, &batch, RESIDUAL_NONE))
    }
    return flag;
}
