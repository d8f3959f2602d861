/* Vector primitives of 16 lanes: AVX-512 F, BW, DQ and VL. */
#define LANES 16

typedef __m512 vf;
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef __mmask16 vmask;

static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vi vi_set1(int32_t x) { return (vi)_mm512_set1_epi32(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }

static inline vi vi_load_i8(const int8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline vi vi_load_u8(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline vi vi_load_u16(const uint16_t *p) {
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}

static inline vf vf_from(vi v) { return _mm512_cvtepi32_ps((__m512i)v); }
static inline vi vi_rint(vf v) { return (vi)_mm512_cvtps_epi32(v); }

/* a * b + c where the product is exact, so that rounding it or not makes no difference. */
static inline vf vf_add_exact_product(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

static inline vmask vf_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline uint32_t vmask_bits(vmask m) { return m; }
static inline vf vf_blend(vmask m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline vi vi_count(vi counter, vmask m) {
    return (vi)_mm512_mask_add_epi32((__m512i)counter, m, (__m512i)counter, _mm512_set1_epi32(1));
}
static inline vi vi_max(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static inline vi vi_min(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
static inline int32_t vi_reduce_max(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
static inline int32_t vi_reduce_or(vi v) { return _mm512_reduce_or_epi32((__m512i)v); }

/* Lanes added in halves. */
static inline float vf_sum_halves(vf v) {
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* The low byte of each lane. */
static inline __attribute__((always_inline)) void store_bytes(void *p, const vi *v, const int num) {
    for (int k = 0; k < num; k++) _mm_storeu_si128((__m128i *)p + k, _mm512_cvtepi32_epi8((__m512i)v[k]));
}

/* To bytes from -127 to 127, the nearest of them. */
static inline __attribute__((always_inline)) void store_clamped(void *p, const vi *v, const int num) {
    for (int k = 0; k < num; k++) {
        __m128i bytes = _mm_max_epi8(_mm512_cvtsepi32_epi8((__m512i)v[k]), _mm_set1_epi8(-127));
        _mm_storeu_si128((__m128i *)p + k, bytes);
    }
}

static inline void load_halves(float *out, const uint16_t *p, int n) {
    for (int i = 0; i < n; i += 16) vf_store(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + i))));
}
static inline void store_halves(uint16_t *p, const float *x, int n) {
    for (int i = 0; i < n; i += 16) {
        __m256i half = _mm512_cvtps_ph(vf_load(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256((__m256i *)(p + i), half);
    }
}

static inline vf vf_gather(const float *table, vi i) { return _mm512_i32gather_ps((__m512i)i, table, 4); }

/* table[index mod 16]. */
#define LOOKUP_BITS 4
static inline vf vf_lookup(vf table, vi index) { return _mm512_permutexvar_ps((__m512i)index, table); }
