/* Vector primitives of 8 lanes: AVX2 and F16C. */
#define LANES 8

typedef __m256 vf;
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef __m256 vmask;

static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vi vi_set1(int32_t x) { return (vi)_mm256_set1_epi32(x); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }

static inline vi vi_load_i8(const int8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vi vi_load_u8(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vi vi_load_u16(const uint16_t *p) {
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

static inline vf vf_from(vi v) { return _mm256_cvtepi32_ps((__m256i)v); }
static inline vi vi_rint(vf v) { return (vi)_mm256_cvtps_epi32(v); }

/* a * b + c where the product is exact, so that rounding it or not makes no difference. */
static inline vf vf_add_exact_product(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

static inline vmask vf_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
static inline uint32_t vmask_bits(vmask m) { return (uint32_t)_mm256_movemask_ps(m); }
static inline vf vf_blend(vmask m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
static inline vi vi_count(vi counter, vmask m) { return counter - (vi)m; }
static inline vi vi_max(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
static inline vi vi_min(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }

static inline int32_t vi_reduce_max(vi v) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xB1));
    return _mm_cvtsi128_si32(x);
}
static inline int32_t vi_reduce_or(vi v) {
    __m128i x = _mm_or_si128(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    x = _mm_or_si128(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_or_si128(x, _mm_shuffle_epi32(x, 0xB1));
    return _mm_cvtsi128_si32(x);
}

/* Lanes added in halves. */
static inline float vf_sum_halves(vf v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* The low byte of each lane of 1, 2 or 4 vectors. Packing works within 128-bit halves, hence the shuffles. */
static inline __attribute__((always_inline)) void store_bytes(void *p, const vi *v, const int num) {
    const __m256i low = _mm256_set1_epi32(0xFF), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i a = _mm256_and_si256((__m256i)v[0], low), b = _mm256_and_si256((__m256i)v[num > 1 ? 1 : 0], low);
    __m256i ab = _mm256_packus_epi32(a, b), cd = ab;
    if (num == 4) {
        __m256i c = _mm256_and_si256((__m256i)v[2], low), d = _mm256_and_si256((__m256i)v[3], low);
        cd = _mm256_packus_epi32(c, d);
    }
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order);
    if (num == 4) {
        _mm256_storeu_si256((__m256i *)p, bytes);
    } else { /* the dwords of vector 0 are the bytes' dwords 0 and 1, those of vector 1 follow at 2 and 3 */
        if (num == 2) _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(bytes));
        else _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(bytes));
    }
}

/* To bytes from -127 to 127, the nearest of them, of 4 vectors. */
static inline __attribute__((always_inline)) void store_clamped(void *p, const vi *v, const int num) {
    (void)num;
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i ab = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
    __m256i cd = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
    __m256i bytes = _mm256_max_epi8(_mm256_packs_epi16(ab, cd), _mm256_set1_epi8(-127));
    _mm256_storeu_si256((__m256i *)p, _mm256_permutevar8x32_epi32(bytes, order));
}

static inline void load_halves(float *out, const uint16_t *p, int n) {
    for (int i = 0; i < n; i += 8) vf_store(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i))));
}
static inline void store_halves(uint16_t *p, const float *x, int n) {
    for (int i = 0; i < n; i += 8) {
        __m128i half = _mm256_cvtps_ph(vf_load(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(p + i), half);
    }
}

static inline vf vf_gather(const float *table, vi i) { return _mm256_i32gather_ps(table, (__m256i)i, 4); }

/* table[index mod 8]. */
#define LOOKUP_BITS 3
static inline vf vf_lookup(vf table, vi index) { return _mm256_permutevar8x32_ps(table, (__m256i)index); }
