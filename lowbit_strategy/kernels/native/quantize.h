/* From floats to codes, one a byte, with the update of the residual e' = old * e + new * (h - sent) on the way. */

struct update {
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
    const float *h, int n, float scale, int qmax, int offset, void *codes, vu counter, const struct update *update,
    const int stochastic
) {
    const struct update to = update ? *update : (struct update){0}; /* a copy of its own, which no store can change */
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
            if (update) largest = apply_update(&to, at, x, vf_from(q) * vf_set1(scale), largest);
        }
        store_bytes((uint8_t *)codes + i, c);
    }
    return vi_reduce_max(largest);
}

/* Codes: the number of thresholds below h / scale. Returns the bits of the largest updated residual. */
ALWAYS_INLINE int32_t quantize_fitted(
    const struct lowbit_format *fmt, const float *h, float scale, uint8_t *codes, const struct update *update,
    const int num_thresholds
) {
    const struct update to = update ? *update : (struct update){0};
    const vf inverse = vf_set1(1.0f / scale), lowest = vf_set1(fmt->levels[0]);
    const float *thresholds = fmt->thresholds, *levels = fmt->levels + 1;
    float few[2][3];
    if (num_thresholds <= 3) { /* copies that stay in registers */
        memcpy(few[0], thresholds, (size_t)num_thresholds * 4);
        memcpy(few[1], levels, (size_t)num_thresholds * 4);
        thresholds = few[0];
        levels = few[1];
    }
    vi largest = vi_set1(0);
    for (int i = 0; i < fmt->block_size; i += LOWBIT_GROUP) {
        vi c[NUM_VECTORS];
        for (int k = 0; k < NUM_VECTORS; k++) {
            int at = i + k * LANES;
            vf x = vf_load(h + at), y = x * inverse, level = lowest;
            vi code = vi_set1(0);
            for (int t = 0; t < num_thresholds; t++) {
                vmask above = vf_gt(y, vf_set1(thresholds[t]));
                code = vi_count(code, above);
                level = vf_blend(above, vf_set1(levels[t]), level);
            }
            c[k] = code;
            if (update) largest = apply_update(&to, at, x, level * vf_set1(scale), largest);
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

/* One block with a positive scale; a loop of its own for every combination that is worth it. */
ALWAYS_INLINE int32_t quantize(
    const struct lowbit_format *fmt, const float *h, float scale, uint8_t *codes, const struct update *update,
    int stochastic, uint32_t key, int64_t first
) {
    const int n = fmt->block_size, qmax = fmt->zero_code;
    switch (fmt->num_levels) {
    case 0: break;
    case 2: return quantize_fitted(fmt, h, scale, codes, update, 1);
    case 3: return quantize_fitted(fmt, h, scale, codes, update, 2);
    case 4: return quantize_fitted(fmt, h, scale, codes, update, 3);
    default: return quantize_fitted(fmt, h, scale, codes, update, fmt->num_levels - 1);
    }
    if (stochastic) return quantize_uniform(h, n, scale, qmax, qmax, codes, dither_counter(first, key), update, 1);
    return quantize_uniform(h, n, scale, qmax, qmax, codes, (vu)vi_set1(0), update, 0);
}
