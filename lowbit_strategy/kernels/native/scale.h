/* The scale of a block: its largest magnitude, or a sum over it, rounded up to bfloat16. */

ALWAYS_INLINE vi vi_magnitude(vf v) { return (vi)v & BITS_ABS; }

/* Sum of term(h[i]), by adding halves until one number is left: every backend adds in this order.
 * A step here takes quarters, which are two halvings at once. */
#define TREE_SUM(term) \
    BUFFER(float, partial, LOWBIT_MAX_BLOCK / 4); \
    int quarter = n / 4 < LANES ? LANES : n / 4; /* 32 elements in 16 lanes: one halving */ \
    for (int i = 0; i < quarter; i += LANES) { \
        vf sum = term(h + i) + term(h + i + n / 2); \
        if (n / 4 >= LANES) sum = sum + (term(h + i + n / 4) + term(h + i + n / 2 + n / 4)); \
        vf_store(partial + i, sum); \
    } \
    return sum_halves(partial, quarter)

static inline float sum_halves(float *x, int n) {
    for (n /= 2; n >= LANES; n /= 2)
        for (int i = 0; i < n; i += LANES) vf_store(x + i, vf_load(x + i) + vf_load(x + i + n));
    return vf_sum_halves(vf_load(x));
}

ALWAYS_INLINE vf square_of(const float *x, vf unit) {
    vf v = vf_load(x) * unit;
    return v * v;
}

static float sum_squares(const float *h, int n, vf unit) {
#define SQUARE(p) square_of(p, unit)
    TREE_SUM(SQUARE);
}

static float sum_magnitudes(const float *h, int n) {
#define MAGNITUDE(p) ((vf)vi_magnitude(vf_load(p)))
    TREE_SUM(MAGNITUDE);
}

/* Root mean square. A power of two near the largest magnitude keeps squares in range. */
static float rms(const float *h, int n, int count, int32_t largest) {
    int exponent = largest == 0 ? 0 : (largest >> 23) - 126; /* as frexp has it, but for what the next line clamps */
    exponent = exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
    float mean = sum_squares(h, n, vf_set1(exp2_int(-exponent))) / (float)count;
    return __builtin_sqrtf(mean) * exp2_int(exponent);
}

/* The scale before it is rounded. `count`: elements that are not padding. */
static float sum_scale(const struct lowbit_format *fmt, const float *h, int count, int32_t largest) {
    int n = fmt->block_size;
    if (largest > BITS_FLT_MAX) return 0.0f;
    if (fmt->rule == RULE_RMS) return rms(h, n, count, largest);
    return sum_magnitudes(h, n) / (float)count;
}

ALWAYS_INLINE vi vi_select(vi mask, vi yes, vi no) { return (mask & yes) | (~mask & no); }

/* Scales of a batch from raw ones: to bfloat16 without going below; 0 under the smallest normal number. Beyond `most`,
 * where a value would overflow, and where the block is not finite: NaN, or `most` if they saturate. `largest`: bits of
 * the largest magnitudes. */
ALWAYS_INLINE void round_scales(
    float scale[BATCH_BLOCKS], float inverse[BATCH_BLOCKS], const int32_t largest[BATCH_BLOCKS], int num_blocks,
    float most, const int saturate
) {
    const int32_t limit = (int32_t)bits_of(most), beyond = saturate ? limit : BITS_NAN;
    for (int b = 0; b < num_blocks; b += LANES) {
        vi bits, magnitude;
        memcpy(&bits, scale + b, sizeof bits);
        memcpy(&magnitude, largest + b, sizeof magnitude);
        bits = (vi)(((vu)bits + 0xFFFFu) & 0xFFFF0000u); /* unsigned: the bits of a NaN may overflow */
        bits = bits & (bits >= BITS_FLT_MIN);
        bits = vi_select((bits > limit) | (magnitude > BITS_FLT_MAX), vi_set1(beyond), bits);
        memcpy(scale + b, &bits, sizeof bits);
        vf_store(inverse + b, 1.0f / (vf)bits);
    }
}

ALWAYS_INLINE void absmax_scales(
    float scale[BATCH_BLOCKS], float inverse[BATCH_BLOCKS], const int32_t largest[BATCH_BLOCKS], int num_blocks,
    float top, float most, const int saturate
) {
    for (int b = 0; b < num_blocks; b += LANES)
        vf_store(scale + b, vf_load((const float *)largest + b) * vf_set1((float)(1.0 / top)));
    round_scales(scale, inverse, largest, num_blocks, most, saturate);
}
