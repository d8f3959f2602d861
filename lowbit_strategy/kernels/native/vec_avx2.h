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
static inline void vf_stream(float *p, vf v) { _mm256_stream_ps(p, v); }
static inline void stream_fence(void) { _mm_sfence(); }

static inline vi vi_load_i8(const int8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vi vi_load_u8(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vi vi_load_u16(const uint16_t *p) {
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}

static inline vf vf_from(vi v) { return _mm256_cvtepi32_ps((__m256i)v); }
static inline vi vi_rint(vf v) { return (vi)_mm256_cvtps_epi32(v); }

static inline vmask vf_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
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

/* The low byte of each of 32 lanes. Packing works within 128-bit halves, so the four-byte pieces come out shuffled. */
static inline void store_bytes(void *p, const vi v[4]) {
    const __m256i low = _mm256_set1_epi32(0xFF), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i a = _mm256_packus_epi32(_mm256_and_si256((__m256i)v[0], low), _mm256_and_si256((__m256i)v[1], low));
    __m256i b = _mm256_packus_epi32(_mm256_and_si256((__m256i)v[2], low), _mm256_and_si256((__m256i)v[3], low));
    _mm256_storeu_si256((__m256i *)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order));
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

/* table[index mod 8] in one instruction. */
#define LOOKUP_BITS 3
static inline vf vf_lookup(vf table, vi index) { return _mm256_permutevar8x32_ps(table, (__m256i)index); }
