/* Matrices with scales of rows times columns: the definition is kernels/reference/rank1.py.
 *
 * Encoding reads a message twice: once for the sums over its columns, then row by row. Rows are loaded into buffers that
 * zeros fill up, so that loops take whole groups of vectors; codes of the rows are one stream, which is packed block by
 * block. Decoding takes some rows at a time.
 */
#define ROW_STEP 64      /* buffers of a row have a multiple of it: four vectors of any instruction set */
#define MAX_LEVELS 64    /* of a sum by pairs over rows */
#define DECODE_STEP 2048 /* elements that are decoded together, or one row */

enum { ROW_FINITE = 1, ROW_IDLE = 2 };

struct matrix {
    const struct lowbit_format *fmt;
    const struct lowbit_call *call;
    const struct lowbit_segment *segment;
    int64_t rows, columns, wide, padded; /* wide: of a row's buffer; padded: a power of two for sums by halves */
    float *h, *e, *y, *terms, *column, *inverse, *levels;
    int8_t *q;
    uint8_t *codes, *packing, *states;
};

static int64_t round_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Numbers of a row, converted. */
static void load_row_floats(const struct matrix *m, float *out, int64_t start) {
    for (int64_t i = 0; i < m->columns; i += LOWBIT_MAX_BLOCK) {
        int64_t left = m->columns - i, count = left < LOWBIT_MAX_BLOCK ? left : LOWBIT_MAX_BLOCK;
        load_floats(out + i, m->call->x, start + i, (int)count, (int)round_to(count, ROW_STEP), m->call->x_dtype);
    }
}

static int32_t largest_magnitude(const float *x, int64_t n) {
    vi largest = vi_set1(0);
    for (int64_t i = 0; i < n; i += LANES) largest = vi_max(largest, vi_magnitude(vf_load(x + i)));
    return vi_reduce_max(largest);
}

/* h = g + e of row i, and e. Returns whether h is finite, and whether g is all zero. */
static int load_row(const struct matrix *m, int64_t i, float *h, float *e) {
    const struct lowbit_call *call = m->call;
    const int64_t state = m->segment->state_offset + i * m->columns;
    load_row_floats(m, h, m->segment->x_offset + i * m->columns);
    if (call->residual_kind == RESIDUAL_NONE) return largest_magnitude(h, m->wide) > BITS_FLT_MAX ? 0 : ROW_FINITE;
    int idle = largest_magnitude(h, m->wide) == 0 ? ROW_IDLE : 0;
    if (call->reset) {
        memset(e, 0, (size_t)m->wide * 4);
    } else if (call->residual_kind == RESIDUAL_FLOAT32) {
        memcpy(e, (const float *)call->residual + state, (size_t)m->columns * 4);
    } else {
        const vf scale = vf_set1(bfloat16_to_float(call->residual_scale[state / m->columns]));
        memcpy(m->q, (const int8_t *)call->residual + state, (size_t)m->columns);
        for (int64_t j = 0; j < m->wide; j += LANES) vf_store(e + j, vf_from(vi_load_i8(m->q + j)) * scale);
    }
    vi largest = vi_set1(0);
    for (int64_t j = 0; j < m->wide; j += LANES) {
        vf sum = vf_load(h + j) + vf_load(e + j);
        largest = vi_max(largest, vi_magnitude(sum));
        vf_store(h + j, sum);
    }
    return idle | (vi_reduce_max(largest) > BITS_FLT_MAX ? 0 : ROW_FINITE);
}

static void add_to(float *out, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) vf_store(out + i, vf_load(a + i) + vf_load(b + i));
}

/* Sums of magnitudes over the rows, neighbours first, then pairs of them, and so on. Fills in what state rows are in. */
static const float *sum_columns(struct matrix *m) {
    const int64_t wide = m->wide, groups = (m->rows + 3) / 4;
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t k = 0; k < 4; k++) {
            float *h = m->h + k * wide;
            int state = 0;
            if (4 * g + k < m->rows) m->states[4 * g + k] = (uint8_t)(state = load_row(m, 4 * g + k, h, m->e));
            if (state != ROW_FINITE) memset(h, 0, (size_t)wide * 4); /* idle, not finite, or behind the last row */
        }
        int level = 0;
        while (g >> level & 1) level++;
        float *sum = m->levels + level * wide;
        for (int64_t i = 0; i < wide; i += LANES) {
            vf row[4];
            for (int k = 0; k < 4; k++) row[k] = (vf)vi_magnitude(vf_load(m->h + k * wide + i));
            vf_store(sum + i, (row[0] + row[1]) + (row[2] + row[3]));
        }
        for (int l = 0; l < level; l++) add_to(sum, m->levels + l * wide, sum, wide);
    }
    float *total = NULL;
    for (int l = 0; groups >> l; l++) {
        if (!(groups >> l & 1)) continue;
        float *sum = m->levels + l * wide;
        if (total) add_to(sum, sum, total, wide);
        total = sum;
    }
    return total;
}

/* Scales of columns, to the wire too. Returns whether no sum was infinite. */
static int scale_columns(struct matrix *m, uint8_t *wire) {
    const float *total = sum_columns(m);
    const int32_t bits = largest_magnitude(total, m->wide);
    const float largest = float_of((uint32_t)bits);
    const int finite = bits <= BITS_FLT_MAX;
    for (int64_t j = 0; j < m->wide; j++) {
        float scale = bits > 0 && finite ? round_up_bfloat16(total[j] / largest) : 0.0f;
        if (scale < float_of(BITS_FLT_MIN)) scale = 0.0f;
        m->column[j] = scale;
        m->inverse[j] = scale > 0.0f ? 1.0f / scale : 0.0f;
    }
    for (int64_t j = 0; j < m->columns; j++) {
        uint16_t half = (uint16_t)(bits_of(m->column[j]) >> 16);
        memcpy(wire + 2 * j, &half, 2);
    }
    return finite;
}

ALWAYS_INLINE float sum_row(const struct matrix *m, const int squares, vf unit, vf threshold, vi *above) {
    for (int64_t i = 0; i < m->padded; i += LANES) {
        vf v = vf_load(m->y + i);
        if (squares) {
            v = v * unit;
            vf_store(m->terms + i, v * v);
        } else {
            vf_store(m->terms + i, magnitude_above(m->y + i, threshold, above));
        }
    }
    for (int64_t n = m->padded / 2; n >= LANES; n /= 2)
        for (int64_t i = 0; i < n; i += LANES) vf_store(m->terms + i, vf_load(m->terms + i) + vf_load(m->terms + i + n));
    return vf_sum_halves(vf_load(m->terms));
}

/* The scale of the row in `y`, rounded: as of a block, NaN where it would overflow. */
static float scale_row(const struct matrix *m, int32_t largest) {
    const struct lowbit_format *fmt = m->fmt;
    const vf none = vf_set1(0.0f), everything = vf_set1(-1.0f);
    const float count = (float)m->columns;
    vi above = vi_set1(0);
    float raw;
    if (largest > BITS_FLT_MAX) return float_of(BITS_NAN);
    if (fmt->rule == RULE_ABSMAX) {
        raw = float_of((uint32_t)largest) * (float)(1.0 / fmt->zero_code);
    } else if (fmt->rule == RULE_RMS) {
        int exponent = largest == 0 ? 0 : (largest >> 23) - 126; /* as in rms() */
        exponent = exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
        float mean = sum_row(m, 1, vf_set1(exp2_int(-exponent)), none, &above) / count;
        raw = __builtin_sqrtf(mean) * exp2_int(exponent);
    } else {
        raw = sum_row(m, 0, none, everything, &above) / count;
        if (fmt->rule == RULE_TERNARY) {
            above = vi_set1(0);
            float total = sum_row(m, 0, none, vf_set1(raw * 0.7f), &above);
            int num_above = 0;
            for (int k = 0; k < LANES; k++) num_above += above[k];
            raw = total / (float)(num_above > 1 ? num_above : 1);
        }
    }
    float scale = round_up_bfloat16(raw);
    if (scale < float_of(BITS_FLT_MIN)) return 0.0f;
    return scale <= fmt->max_scale ? scale : float_of(BITS_NAN);
}

/* Codes of the row, one per byte, and its updated residual over e. Returns the bits of the largest of that. */
ALWAYS_INLINE int32_t quantize_row(
    const struct matrix *m, uint8_t *codes, float scale, vu counter, const int num_values, const int stochastic,
    const int update
) {
    enum { num = 4 };
    const struct lowbit_format *fmt = m->fmt;
    const vf inverse = vf_set1(1.0f / scale), old = vf_set1(m->call->beta_old), new = vf_set1(m->call->beta_new);
    const int qmax = fmt->zero_code, thresholds = (num_values < 0 ? fmt->codebook_size : num_values) - 1;
    vi largest[num] = {{0}};
    for (int64_t i = 0; i < m->wide; i += num * LANES) {
        vf y[num], value[num];
        vi code[num];
        EACH(k) y[k] = vf_load(m->y + i + k * LANES) * inverse;
        if (num_values == 0) {
            if (stochastic) {
                vu counters[num];
                EACH(k) counters[k] = counter + (uint32_t)(k * LANES) * GOLDEN;
                add_dither(y, counters, num);
                counter += (uint32_t)(num * LANES) * GOLDEN;
            }
            EACH(k) code[k] = vi_min(vi_max(vi_rint(y[k]), vi_set1(-qmax)), vi_set1(qmax));
            EACH(k) value[k] = vf_from(code[k]);
            EACH(k) code[k] = code[k] + vi_set1(qmax);
        } else {
            EACH(k) value[k] = vf_set1(fmt->codebook[0]);
            EACH(k) code[k] = vi_set1(0);
            for (int t = 0; t < thresholds; t++) {
                vmask above[num];
                EACH(k) above[k] = vf_gt(y[k], vf_set1(fmt->thresholds[t]));
                EACH(k) code[k] = vi_count(code[k], above[k]);
                if (update) EACH(k) value[k] = vf_blend(above[k], vf_set1(fmt->codebook[t + 1]), value[k]);
            }
        }
        store_bytes(codes + i, code, num);
        if (!update) continue;
        EACH(k) value[k] = (value[k] * vf_set1(scale)) * vf_load(m->column + i + k * LANES);
        EACH(k) value[k] = new * (vf_load(m->h + i + k * LANES) - value[k]);
        EACH(k) value[k] = old * vf_load(m->e + i + k * LANES) + value[k];
        EACH(k) vf_store(m->e + i + k * LANES, value[k]);
        EACH(k) largest[k] = vi_max(largest[k], vi_magnitude(value[k]));
    }
    return reduce_group(largest, num);
}

static int32_t quantize_row_as(const struct matrix *m, uint8_t *codes, float scale, vu counter) {
    const int num_values = m->fmt->codebook_size, update = m->call->residual_kind != RESIDUAL_NONE;
    const int stochastic = m->call->stochastic;
    if (!(scale > 0.0f)) { /* nothing is sent */
        memset(codes, m->fmt->zero_code, (size_t)m->columns);
        for (int64_t j = 0; update && j < m->wide; j += LANES) {
            vf missed = vf_set1(m->call->beta_new) * vf_load(m->h + j);
            vf_store(m->e + j, vf_set1(m->call->beta_old) * vf_load(m->e + j) + missed);
        }
        return update ? largest_magnitude(m->e, m->wide) : 0;
    }
#define RUN(...) quantize_row(m, codes, scale, counter, __VA_ARGS__)
    if (num_values == 0 && stochastic) return update ? RUN(0, 1, 1) : RUN(0, 1, 0);
    if (num_values == 0) return update ? RUN(0, 0, 1) : RUN(0, 0, 0);
    if (num_values == 2) return update ? RUN(2, 0, 1) : RUN(2, 0, 0);
    if (num_values == 4) return update ? RUN(4, 0, 1) : RUN(4, 0, 0);
    return update ? RUN(-1, 0, 1) : RUN(-1, 0, 0);
#undef RUN
}

/* The updated residual of row i to where it lies. */
static void store_row(const struct matrix *m, int64_t i, int32_t largest) {
    enum { num = 4 };
    const struct lowbit_call *call = m->call;
    const int64_t at = i * m->columns, state = m->segment->state_offset + at;
    if (call->residual_kind == RESIDUAL_FLOAT32) {
        memcpy((float *)call->residual + state, m->e, (size_t)m->columns * 4);
        return;
    }
    float scale = round_up_bfloat16(float_of((uint32_t)largest) * (float)(1.0 / 127));
    scale = scale > RESIDUAL_MAX_SCALE ? RESIDUAL_MAX_SCALE : scale < float_of(BITS_FLT_MIN) ? 0.0f : scale;
    call->residual_scale[state / m->columns] = (uint16_t)(bits_of(scale) >> 16);
    int8_t *q = (int8_t *)call->residual + state;
    if (!(scale > 0.0f)) {
        memset(q, 0, (size_t)m->columns);
        return;
    }
    const vf inverse = vf_set1(1.0f / scale);
    vu counter = dither_counter(at, stream_key(call->seed, m->segment->salt, RESIDUAL_STREAM));
    for (int64_t j = 0; j < m->wide; j += num * LANES) {
        vf y[num];
        vi rounded[num];
        EACH(k) y[k] = vf_load(m->e + j + k * LANES) * inverse;
        if (call->stochastic_residual) {
            vu counters[num];
            EACH(k) counters[k] = counter + (uint32_t)(k * LANES) * GOLDEN;
            add_dither(y, counters, num);
            counter += (uint32_t)(num * LANES) * GOLDEN;
        }
        EACH(k) rounded[k] = vi_rint(y[k]);
        store_clamped(m->q + j, rounded, num);
    }
    memcpy(q, m->q, (size_t)m->columns);
}

/* Whole blocks of `codes` to the wire; what is left of `count` codes moves to the front. */
static int64_t pack_stream(const struct matrix *m, int64_t count, uint8_t **out) {
    const struct lowbit_format *fmt = m->fmt;
    const int n = fmt->block_size, most = LOWBIT_MAX_BLOCK / n;
    uint8_t *from = m->codes;
    while (count >= n) {
        int num = fmt->ternary ? 1 : count / n < most ? (int)(count / n) : most;
        memcpy(m->packing, from, (size_t)(num * n));
        pack(fmt, m->packing, *out, num);
        *out += num * fmt->code_nbytes;
        from += num * n;
        count -= num * n;
    }
    memmove(m->codes, from, (size_t)count);
    return count;
}

static int encode_message(struct matrix *m) {
    const struct lowbit_call *call = m->call;
    const struct lowbit_format *fmt = m->fmt;
    const int64_t num_blocks = (m->segment->numel + fmt->block_size - 1) / fmt->block_size;
    uint8_t *out = call->wire + m->segment->wire_offset, *row_scales = out + num_blocks * fmt->code_nbytes;
    const uint32_t key = stream_key(call->seed, m->segment->salt, CODE_STREAM);
    const int loco = call->residual_kind != RESIDUAL_NONE, usable = scale_columns(m, row_scales + 2 * m->rows);
    int64_t pending = 0;
    int flag = 0;
    for (int64_t i = 0; i < m->rows; i++) {
        const int idle = m->states[i] & ROW_IDLE, finite = usable && m->states[i] & ROW_FINITE;
        float scale = finite ? 0.0f : float_of(BITS_NAN);
        load_row(m, i, m->h, m->e);
        if (finite && !idle) {
            vi largest = vi_set1(0);
            for (int64_t j = 0; j < m->wide; j += LANES) {
                vf y = vf_load(m->h + j) * vf_load(m->inverse + j);
                largest = vi_max(largest, vi_magnitude(y));
                vf_store(m->y + j, y);
            }
            scale = scale_row(m, vi_reduce_max(largest));
        }
        uint16_t half = (uint16_t)(bits_of(scale) >> 16);
        memcpy(row_scales + 2 * i, &half, 2);
        const int bad = scale != scale;
        flag |= bad;
        int32_t largest = quantize_row_as(m, m->codes + pending, scale, dither_counter(i * m->columns, key));
        if (loco && !idle && !bad) {
            store_row(m, i, largest);
        } else if (loco && call->reset) {
            int64_t state = m->segment->state_offset + i * m->columns;
            forget(call, state, state / m->columns, (int)m->columns);
        }
        pending = pack_stream(m, pending + m->columns, &out);
    }
    if (pending) {
        memset(m->codes + pending, fmt->zero_code, (size_t)(fmt->block_size - pending));
        pack_stream(m, fmt->block_size, &out);
    }
    return flag;
}

/* The buffers of all messages of a call, in one piece of memory; NULL where there is none. */
static void *lay_out(
    struct matrix *m, const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t columns, int64_t first,
    int64_t last
) {
    int64_t rows = 0, levels = 1;
    for (int64_t s = first; s < last; s++) rows = largest_of(rows, call->segments[s].numel / columns);
    while ((rows + 3) / 4 >> levels) levels++;
    *m = (struct matrix){.fmt = fmt, .call = call, .columns = columns, .wide = round_to(columns, ROW_STEP)};
    for (m->padded = LANES; m->padded < columns;) m->padded *= 2;
    const int64_t long_row = largest_of(m->wide, m->padded), stream = fmt->block_size + m->wide + PACK_SLACK;
    const int64_t num_floats = (4 + 1 + 2 + levels) * m->wide + 2 * long_row;
    const int64_t packing = LOWBIT_MAX_BLOCK * 2 + PACK_SLACK;
    float *memory = calloc((size_t)(4 * num_floats + m->wide + stream + packing + rows), 1);
    if (!memory) return NULL;
    m->h = memory;
    m->e = m->h + 4 * m->wide;
    m->column = m->e + m->wide;
    m->inverse = m->column + m->wide;
    m->levels = m->inverse + m->wide;
    m->y = m->levels + levels * m->wide;
    m->terms = m->y + long_row;
    m->q = (int8_t *)(m->terms + long_row);
    m->codes = (uint8_t *)m->q + m->wide;
    m->packing = m->codes + stream;
    m->states = m->packing + packing;
    return memory;
}

/* Messages [first, last). Returns 1 where something was not finite, -1 where there is no memory. */
static int rank1_encode(
    const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t columns, int64_t first, int64_t last
) {
    struct matrix m;
    void *memory = lay_out(&m, fmt, call, columns, first, last);
    if (!memory) return -1;
    int flag = 0;
    for (int64_t s = first; s < last; s++) {
        m.segment = call->segments + s;
        m.rows = m.segment->numel / columns;
        if (m.rows) flag |= encode_message(&m);
    }
    free(memory);
    return flag;
}

/* total += values of one row. `codes`: one per byte. */
ALWAYS_INLINE void add_row(
    const struct lowbit_format *fmt, const uint8_t *codes, const float *column, float scale, float *total, int64_t n,
    const int how
) {
    const vf row = vf_set1(scale);
#if LOOKUP_BITS
    const vf table = codebook_in_register(fmt) * row;
#endif
    for (int64_t i = 0; i < n; i += LANES) {
        vi code = vi_load_u8(codes + i);
        vf value;
#if LOOKUP_BITS
        if (how == BY_REGISTER) value = vf_lookup(table, code);
        else
#endif
        if (how == BY_ARITHMETIC) value = vf_from(code - vi_set1(fmt->zero_code)) * row;
        else value = vf_gather(fmt->codebook, code) * row;
        vf_store(total + i, vf_load(total + i) + value * vf_load(column + i));
    }
}

struct decoding {
    float *columns, *total; /* columns: of all sources */
    uint8_t *codes, *unpacking;
};

/* Codes of elements [first, first + count) of one source, one per byte; returns where they begin. */
static const uint8_t *unpack_stream(
    const struct lowbit_format *fmt, const uint8_t *message, int64_t first, int64_t count, struct decoding *to
) {
    const int64_t n = fmt->block_size, from = first / n, until = (first + count + n - 1) / n;
    const int64_t most = fmt->ternary ? 1 : largest_of(1, LOWBIT_MAX_BLOCK / n);
    for (int64_t b = from; b < until;) {
        int64_t num = until - b < most ? until - b : most;
        unpack(fmt, message + b * fmt->code_nbytes, to->unpacking, (int)num);
        memcpy(to->codes + (b - from) * n, to->unpacking, (size_t)(num * n));
        b += num;
    }
    return to->codes + (first - from * n);
}

static void decode_message(
    const struct lowbit_format *fmt, const struct lowbit_call *call, const struct lowbit_segment *segment,
    int64_t columns, struct decoding *to
) {
    const int64_t rows = segment->numel / columns, wide = round_to(columns, ROW_STEP);
    const int64_t num_blocks = (segment->numel + fmt->block_size - 1) / fmt->block_size;
    const int64_t scales = num_blocks * fmt->code_nbytes, step = largest_of(1, DECODE_STEP / columns);
    const int how = choose_reading(fmt).how;
    for (int64_t w = 0; w < call->num_sources; w++) {
        const uint8_t *at = call->wire + w * call->wire_stride + segment->wire_offset + scales + 2 * rows;
        for (int64_t j = 0; j < columns; j++) {
            uint16_t half;
            memcpy(&half, at + 2 * j, 2);
            to->columns[w * wide + j] = bfloat16_to_float(half);
        }
    }
    for (int64_t i = 0; i < rows; i += step) {
        const int64_t taken = rows - i < step ? rows - i : step;
        memset(to->total, 0, (size_t)(taken * wide) * 4);
        for (int64_t w = 0; w < call->num_sources; w++) {
            const uint8_t *message = call->wire + w * call->wire_stride + segment->wire_offset;
            const uint8_t *codes = unpack_stream(fmt, message, i * columns, taken * columns, to);
            for (int64_t r = 0; r < taken; r++) {
                uint16_t half;
                memcpy(&half, message + scales + 2 * (i + r), 2);
                const float scale = bfloat16_to_float(half), *column = to->columns + w * wide;
                float *total = to->total + r * wide;
                switch (how) {
                case BY_ARITHMETIC:
                    add_row(fmt, codes + r * columns, column, scale, total, columns, BY_ARITHMETIC);
                    break;
                case BY_REGISTER:
                case BY_BITS:
                    add_row(fmt, codes + r * columns, column, scale, total, columns, BY_REGISTER);
                    break;
                default: add_row(fmt, codes + r * columns, column, scale, total, columns, BY_MEMORY);
                }
            }
        }
        for (int64_t r = 0; r < taken; r++) {
            float *total = to->total + r * wide;
            for (int64_t j = 0; j < columns; j++) total[j] *= call->alpha;
            for (int64_t j = 0; j < columns; j += LOWBIT_MAX_BLOCK) {
                int64_t left = columns - j, count = left < LOWBIT_MAX_BLOCK ? left : LOWBIT_MAX_BLOCK;
                store_floats(call, segment->x_offset + (i + r) * columns + j, total + j, (int)count);
            }
        }
    }
}

/* Messages [first, last). Returns -1 where there is no memory. */
static int rank1_decode_sum(
    const struct lowbit_format *fmt, const struct lowbit_call *call, int64_t columns, int64_t first, int64_t last
) {
    const int64_t wide = round_to(columns, ROW_STEP), step = largest_of(1, DECODE_STEP / columns);
    const int64_t codes = step * columns + 2 * fmt->block_size + ROW_STEP, unpacking = 2 * LOWBIT_MAX_BLOCK + PACK_SLACK;
    const int64_t num_floats = (call->num_sources + step) * wide;
    float *memory = calloc((size_t)(4 * num_floats + codes + unpacking), 1);
    if (!memory) return -1;
    struct decoding to = {memory, memory + call->num_sources * wide, (uint8_t *)(memory + num_floats), NULL};
    to.unpacking = to.codes + codes;
    for (int64_t s = first; s < last; s++)
        if (call->segments[s].numel) decode_message(fmt, call, call->segments + s, columns, &to);
    free(memory);
    return 0;
}
