/* From floats to codes, and the update of the residual e' = old * e + new * (h - sent) on the way.
 *
 * Functions that are always inlined take trailing constants and are compiled for each combination that is used: `kind`
 * of residual; `num` vectors in a group; `parts` of a block that these vectors come from. With parts = 8 / bits, a
 * group's codes are what half-split packing puts into the same bytes: they are packed in their lanes. With parts = 1
 * they are written one per byte.
 */

/* Where a block's h = g + e comes from, with e = q * q_scale for an int8 residual. */
struct source {
    const float *g, *e;
    const int8_t *q;
    float q_scale;
};

/* Where its e' goes. */
struct update {
    float *out;
    float beta_old, beta_new;
};

/* Position of a group's k-th vector, counted from the first one's. */
ALWAYS_INLINE int place(int k, int n, const int num, const int parts) {
    const int each = num / parts;
    return k / each * (n / parts) + k % each * LANES;
}

/* h of a group that starts at element i, and e, which is not touched without a residual. */
ALWAYS_INLINE void load_group(
    const struct source *from, int i, int n, vf *h, vf *e, const int kind, const int num, const int parts
) {
    if (kind == RESIDUAL_INT8) {
        EACH(k) e[k] = vf_from(vi_load_i8(from->q + i + place(k, n, num, parts)));
        EACH(k) e[k] = e[k] * vf_set1(from->q_scale);
    }
    if (kind == RESIDUAL_FLOAT32) EACH(k) e[k] = vf_load(from->e + i + place(k, n, num, parts));
    EACH(k) h[k] = vf_load(from->g + i + place(k, n, num, parts));
    if (kind != RESIDUAL_NONE) EACH(k) h[k] = h[k] + e[k];
}

/* `largest`: running maximum of the bits of |e'|. */
ALWAYS_INLINE void update_group(
    const struct update *to, int i, int n, const vf *h, vf *e, const vf *sent, vi *largest, const int num,
    const int parts
) {
    vf missed[MAX_GROUP];
    EACH(k) missed[k] = h[k] - sent[k];
    EACH(k) e[k] = vf_set1(to->beta_old) * e[k];
    EACH(k) missed[k] = vf_set1(to->beta_new) * missed[k];
    EACH(k) e[k] = e[k] + missed[k];
    EACH(k) vf_store(to->out + i + place(k, n, num, parts), e[k]);
    EACH(k) largest[k] = vi_max(largest[k], vi_magnitude(e[k]));
}

/* Codes code + offset to bytes, `parts` of them in each. */
ALWAYS_INLINE void store_group(uint8_t *out, const vi *code, int offset, const int num, const int parts) {
    const int each = num / parts, width = 8 / parts;
    vi packed[MAX_GROUP];
    int offsets = offset;
    for (int p = 1; p < parts; p++) offsets |= offset << (p * width);
    for (int k = 0; k < each; k++) packed[k] = code[k];
    for (int k = each; k < num; k++) packed[k % each] += code[k] << (k / each * width);
    for (int k = 0; k < each; k++) packed[k] += vi_set1(offsets);
    store_bytes(out, packed, each);
}

ALWAYS_INLINE int32_t reduce_group(const vi *largest, const int num) {
    vi all = largest[0];
    for (int k = 1; k < num; k++) all = vi_max(all, largest[k]);
    return vi_reduce_max(all);
}

/* E2M1: the float of 4 bits that is nearest to y has the code's magnitude as its bits. A code counts thresholds below y:
 * on one of them y goes to the lower side. From 2 on, codes are y's exponent and first bit of mantissa, rounded. */
ALWAYS_INLINE vi nearest_e2m1(vf y) {
    const vi sign = (vi)y >> 31, size = vi_magnitude(y) - sign;
    const vi few = -((size > vi_set1(0x3F000000)) + (size > vi_set1(0x3FC00000))); /* above 0.5 and 1.5 */
    const vi code = vi_max(few, ((size + vi_set1(0x1FFFFF)) >> 22) - vi_set1(254));
    return (code ^ sign) - sign;
}

/* What it stands for: 0, 1, 2, 3, 4, 6, 8, 12 with its sign. */
ALWAYS_INLINE vf e2m1_value(vi code) {
#if LOOKUP_BITS >= 4
    const vf table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -12, -8, -6, -4, -3, -2, -1}; /* the lowest 4 bits count */
    return vf_lookup(table, code);
#else
    const vi sign = code >> 31, size = (code ^ sign) - sign;
    const vi bits = ((size + vi_set1(254)) << 22) + ((size == 1) << 22); /* 1, not 1.5 */
    return (vf)((bits | (sign & vi_set1(INT32_MIN))) & (size > 0));
#endif
}

/* Codes round(h / scale + noise) + offset of one block. Returns the bits of the largest |e'|. */
ALWAYS_INLINE int32_t quantize_grid(
    const struct source *from, int n, float scale, float inverse, int qmax, int offset, uint8_t *codes, vu counter,
    const struct update *to, const int e2m1, const int stochastic, const int kind, const int num, const int parts
) {
    vi largest[MAX_GROUP] = {{0}};
    for (int i = 0; i < n / parts; i += num / parts * LANES) {
        vf h[MAX_GROUP], e[MAX_GROUP], y[MAX_GROUP];
        vi q[MAX_GROUP];
        load_group(from, i, n, h, e, kind, num, parts);
        EACH(k) y[k] = h[k] * vf_set1(inverse);
        if (stochastic) {
            vu counters[MAX_GROUP];
            EACH(k) counters[k] = counter + (uint32_t)place(k, n, num, parts) * GOLDEN;
            add_dither(y, counters, num);
            counter += (uint32_t)(num / parts * LANES) * GOLDEN;
        }
        EACH(k) q[k] = e2m1 ? nearest_e2m1(y[k]) : vi_rint(y[k]);
        /* To nearest stays inside: the scale is not below the largest magnitude over qmax. */
        if (stochastic) EACH(k) q[k] = vi_min(vi_max(q[k], vi_set1(-qmax)), vi_set1(qmax));
        store_group(codes + i, q, offset, num, parts);
        if (kind != RESIDUAL_NONE) {
            EACH(k) y[k] = e2m1 ? e2m1_value(q[k]) : vf_from(q[k]);
            EACH(k) y[k] = y[k] * vf_set1(scale);
            update_group(to, i, n, h, e, y, largest, num, parts);
        }
    }
    return kind == RESIDUAL_NONE ? 0 : reduce_group(largest, num);
}

/* Codes: the number of thresholds below h / scale. Returns the bits of the largest |e'|. */
ALWAYS_INLINE int32_t quantize_fitted(
    const struct lowbit_format *fmt, const struct source *from, float scale, float inverse, uint8_t *codes,
    const struct update *to, const int num_thresholds, const int kind, const int num, const int parts
) {
    const int n = fmt->block_size;
    const float *thresholds = fmt->thresholds, *codebook = fmt->codebook + 1;
    const vf lowest = vf_set1(fmt->codebook[0]);
    float few[2][3];
    if (num_thresholds <= 3) { /* copies that stay in registers */
        memcpy(few[0], thresholds, (size_t)num_thresholds * 4);
        memcpy(few[1], codebook, (size_t)num_thresholds * 4);
        thresholds = few[0];
        codebook = few[1];
    }
    vi largest[MAX_GROUP] = {{0}};
    for (int i = 0; i < n / parts; i += num / parts * LANES) {
        vf h[MAX_GROUP], e[MAX_GROUP], y[MAX_GROUP], value[MAX_GROUP];
        vi code[MAX_GROUP];
        load_group(from, i, n, h, e, kind, num, parts);
        EACH(k) y[k] = h[k] * vf_set1(inverse);
        EACH(k) value[k] = lowest;
        EACH(k) code[k] = vi_set1(0);
        for (int t = 0; t < num_thresholds; t++) {
            vmask above[MAX_GROUP];
            EACH(k) above[k] = vf_gt(y[k], vf_set1(thresholds[t]));
            EACH(k) code[k] = vi_count(code[k], above[k]);
            if (kind != RESIDUAL_NONE) EACH(k) value[k] = vf_blend(above[k], vf_set1(codebook[t]), value[k]);
        }
        store_group(codes + i, code, 0, num, parts);
        if (kind != RESIDUAL_NONE) {
            EACH(k) value[k] = value[k] * vf_set1(scale);
            update_group(to, i, n, h, e, value, largest, num, parts);
        }
    }
    return kind == RESIDUAL_NONE ? 0 : reduce_group(largest, num);
}

/* The same for two values and a block of `num` vectors. The code of element i is bit i of `codes`. */
ALWAYS_INLINE int32_t quantize_signs(
    const struct lowbit_format *fmt, const struct source *from, float scale, float inverse, uint8_t *codes,
    const struct update *to, const int kind, const int num
) {
    const vf threshold = vf_set1(fmt->thresholds[0]);
    vf h[MAX_GROUP], e[MAX_GROUP], value[MAX_GROUP];
    vmask above[MAX_GROUP];
    vi largest[MAX_GROUP] = {{0}};
    load_group(from, 0, num * LANES, h, e, kind, num, 1);
    EACH(k) above[k] = vf_gt(h[k] * vf_set1(inverse), threshold);
    uint64_t bits = 0;
    EACH(k) bits |= (uint64_t)vmask_bits(above[k]) << (k * LANES);
    memcpy(codes, &bits, (size_t)(num * LANES / 8));
    if (kind == RESIDUAL_NONE) return 0;
    EACH(k) value[k] = vf_blend(above[k], vf_set1(fmt->codebook[1] * scale), vf_set1(fmt->codebook[0] * scale));
    update_group(to, 0, num * LANES, h, e, value, largest, num, 1);
    return reduce_group(largest, num);
}

/* Residuals of neighboring blocks to int8, in one loop: the uniform grid of 8 bits, without an offset. */
ALWAYS_INLINE void quantize_residuals(
    const float *e, int num_blocks, int n, const float *inverse, int8_t *q, vu counter, const int stochastic,
    const int num
) {
    const int shift = __builtin_ctz((unsigned)n);
    for (int i = 0; i < num_blocks * n; i += num * LANES) {
        vf y[MAX_GROUP];
        vi rounded[MAX_GROUP];
        EACH(k) y[k] = vf_load(e + i + k * LANES) * vf_set1(inverse[i >> shift]);
        if (stochastic) {
            vu counters[MAX_GROUP];
            EACH(k) counters[k] = counter + (uint32_t)(k * LANES) * GOLDEN;
            add_dither(y, counters, num);
            counter += (uint32_t)(num * LANES) * GOLDEN;
        }
        EACH(k) rounded[k] = vi_rint(y[k]);
        store_clamped(q + i, rounded, num);
    }
}

/* A block of scale 0 sends zeros. Returns the bits of the largest |e'|. */
ALWAYS_INLINE int32_t quantize_nothing(
    const struct lowbit_format *fmt, const struct source *from, const struct update *to, const int kind
) {
    const int n = fmt->block_size;
    vf sent = vf_set1((fmt->codebook_size ? fmt->codebook[fmt->zero_code] : 0.0f) * 0.0f);
    vi largest = vi_set1(0);
    for (int i = 0; i < n; i += LANES) {
        vf h, e;
        load_group(from, i, n, &h, &e, kind, 1, 1);
        update_group(to, i, n, &h, &e, &sent, &largest, 1, 1);
    }
    return vi_reduce_max(largest);
}
