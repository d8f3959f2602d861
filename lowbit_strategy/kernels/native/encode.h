/* Encoding, with the LoCo step: compensate, scale, quantise, pack, update the residual. */
#include "block.h"
#include "scale.h"
#include "quantize.h"
#include "pack.h"

/* A batch on its way. Pointers lead to the caller's memory where that can be used as it is, else to the buffers. */
struct encoding {
    const float *g, *h, *e;
    float *updated;
    int32_t largest_h[BATCH_BLOCKS], largest_g[BATCH_BLOCKS]; /* bits of a magnitude; 0 if all of g is zero */
    float scale[BATCH_BLOCKS];
    int finite[BATCH_BLOCKS], keep[BATCH_BLOCKS]; /* keep: the residual stays as it is */
    BUFFER(float, g_buffer, LOWBIT_MAX_BLOCK);
    BUFFER(float, h_buffer, LOWBIT_MAX_BLOCK);
    BUFFER(float, e_buffer, LOWBIT_MAX_BLOCK);
    BUFFER(uint8_t, codes, LOWBIT_MAX_BLOCK + PACK_SLACK);
};

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

/* h = g + e of one block, with e dequantised. Without a residual h is g itself. */
ALWAYS_INLINE void compensate(
    struct encoding *to, int block, int n, const int8_t *q, float q_scale, const int residual_kind
) {
    const float *g = to->g + block * n, *known_e = to->e + block * n;
    float *e = to->e_buffer + block * n, *h = to->h_buffer + block * n;
    vi largest = vi_set1(0), any = vi_set1(0);
    for (int i = 0; i < n; i += LANES) {
        vf gradient = vf_load(g + i), sum = gradient;
        if (residual_kind == RESIDUAL_INT8) {
            vf residual = vf_from(vi_load_i8(q + i)) * vf_set1(q_scale);
            vf_store(e + i, residual);
            sum = gradient + residual;
        }
        if (residual_kind == RESIDUAL_FLOAT32) sum = gradient + vf_load(known_e + i);
        if (residual_kind != RESIDUAL_NONE) {
            vf_store(h + i, sum);
            any |= (vi)gradient;
        }
        largest = vi_max(largest, vi_magnitude(sum));
    }
    to->largest_h[block] = vi_reduce_max(largest);
    to->largest_g[block] = vi_reduce_or(any) & BITS_ABS;
}

static void compensate_batch(
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
    to->h = to->updated = to->h_buffer;
    to->e = to->e_buffer;
    switch (call->residual_kind) {
    case RESIDUAL_INT8:
        for (int b = 0; b < batch->num_blocks; b++) {
            float scale = call->reset ? 0.0f : bfloat16_to_float(call->residual_scale[batch->state_block + b]);
            compensate(to, b, n, (const int8_t *)call->residual + state + b * n, scale, RESIDUAL_INT8);
        }
        break;
    case RESIDUAL_FLOAT32:
        to->updated = (float *)call->residual + state;
        to->e = call->reset ? zeros : to->updated;
        if (!call->reset && batch->count < all) /* padding needs the old residual once more at the end */
            to->e = memcpy(to->e_buffer, to->updated, (size_t)all * 4);
        for (int b = 0; b < batch->num_blocks; b++) compensate(to, b, n, NULL, 0.0f, RESIDUAL_FLOAT32);
        break;
    default:
        to->h = to->g;
        for (int b = 0; b < batch->num_blocks; b++) compensate(to, b, n, NULL, 0.0f, RESIDUAL_NONE);
    }
}

/* Scales of the batch, to the wire too. Returns whether a block is not finite. */
static int scale_batch(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch
) {
    const int n = fmt->block_size, loco = call->residual_kind != RESIDUAL_NONE;
    int flag = 0;
    for (int b = 0; b < batch->num_blocks; b++) {
        int count = batch->count - b * n < n ? batch->count - b * n : n;
        float scale = block_scale(fmt, to->h + b * n, count, to->largest_h[b]);
        int finite = scale == scale, idle = loco && to->largest_g[b] == 0;
        flag |= !finite;
        to->keep[b] = !loco || idle || !finite;
        to->scale[b] = scale = idle ? 0.0f : scale; /* an idle expert's residual waits for its next gradient */
        uint16_t bits = (uint16_t)(bits_of(scale) >> 16);
        memcpy(call->wire + batch->scales + 2 * b, &bits, 2);
    }
    return flag;
}

static void store_residual(
    const struct lowbit_call *call, const struct batch *batch, int block, int n, const float *updated, int32_t largest
) {
    const int64_t first = batch->first + block * n;
    int8_t *q = (int8_t *)call->residual + batch->segment->state_offset + first;
    float scale = uniform_scale(largest, 127);
    call->residual_scale[batch->state_block + block] = (uint16_t)(bits_of(scale) >> 16);
    if (!(scale > 0.0f)) {
        memset(q, 0, (size_t)n);
    } else if (call->stochastic_residual) {
        uint32_t key = stream_key(call->seed, batch->segment->salt, RESIDUAL_STREAM);
        quantize_uniform(updated, n, scale, 127, 0, q, dither_counter(first, key), NULL, 1);
    } else {
        quantize_uniform(updated, n, scale, 127, 0, q, (vu)vi_set1(0), NULL, 0);
    }
}

static void forget_residual(const struct lowbit_call *call, const struct batch *batch, int block, int n) {
    int64_t at = batch->segment->state_offset + batch->first + block * n;
    if (call->residual_kind == RESIDUAL_INT8) {
        memset((int8_t *)call->residual + at, 0, (size_t)n);
        call->residual_scale[batch->state_block + block] = 0;
    } else {
        memset((float *)call->residual + at, 0, (size_t)n * 4);
    }
}

/* Nothing is sent for padding. Returns the bits of the largest updated residual of the whole block. */
static int32_t update_padding(const struct update *to, int count, int n) {
    vi largest = vi_set1(0);
    for (int i = count; i < n; i++) to->out[i] = to->beta_old * to->e[i] + to->beta_new * (0.0f + to->e[i]);
    for (int i = 0; i < n; i += LANES) largest = vi_max(largest, vi_magnitude(vf_load(to->out + i)));
    return vi_reduce_max(largest);
}

/* Codes of the batch to the wire, and the updated residual. */
static void quantize_batch(
    struct encoding *to, const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch
) {
    const int n = fmt->block_size;
    uint32_t key = call->stochastic ? stream_key(call->seed, batch->segment->salt, CODE_STREAM) : 0;
    int32_t largest[BATCH_BLOCKS] = {0};
    for (int b = 0; b < batch->num_blocks; b++) {
        const int at = b * n, keep = to->keep[b];
        const float *h = to->h + at, scale = to->scale[b];
        const struct update update = {to->e + at, to->updated + at, call->beta_old, call->beta_new};
        if (scale > 0.0f && !keep) {
            largest[b] = quantize(fmt, h, scale, to->codes, &update, call->stochastic, key, batch->first + at);
        } else if (scale > 0.0f) {
            quantize(fmt, h, scale, to->codes, NULL, call->stochastic, key, batch->first + at);
        } else {
            memset(to->codes, fmt->zero_code, (size_t)n);
            if (!keep) largest[b] = quantize_nothing(fmt, h, &update);
        }
        pack(fmt, to->codes, call->wire + batch->codes + (int64_t)b * fmt->code_nbytes);
        if (!keep && batch->count - at < n) largest[b] = update_padding(&update, batch->count - at, n);
    }
    if (call->residual_kind == RESIDUAL_NONE) return;
    for (int b = 0; b < batch->num_blocks; b++) {
        if (to->keep[b]) {
            if (call->reset) forget_residual(call, batch, b, n);
        } else if (call->residual_kind == RESIDUAL_INT8) {
            store_residual(call, batch, b, n, to->updated + b * n, largest[b]);
        }
    }
}

static int encode_batch(const struct lowbit_format *fmt, const struct lowbit_call *call, const struct batch *batch) {
    struct encoding encoding;
    compensate_batch(&encoding, fmt, call, batch);
    int flag = scale_batch(&encoding, fmt, call, batch);
    quantize_batch(&encoding, fmt, call, batch);
    return flag;
}

static int encode(const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t first, int64_t last) {
    int flag = 0;
    FOR_EACH_BATCH(fmt, call, first, last, flag |= encode_batch(fmt, call, &batch))
    return flag;
}
