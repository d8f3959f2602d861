/* Vector primitives of 4 lanes in GCC's and clang's vector extension: SSE2, NEON, or plain registers. */
#define LANES 4

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef vi vmask;

static inline vf vf_set1(float x) { return (vf){x, x, x, x}; }
static inline vi vi_set1(int32_t x) { return (vi){x, x, x, x}; }
static inline vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

static inline vi vi_load_i8(const int8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
static inline vi vi_load_u8(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
static inline vi vi_load_u16(const uint16_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }

static inline vf vf_from(vi v) { return __builtin_convertvector(v, vf); }

/* To the nearest integer, ties to even, for |v| < 2^22: what lies below the last bit of the sum is rounded away. */
static inline vi vi_rint(vf v) { return (vi)(v + 12582912.0f) - 0x4B400000; }

/* a * b + c where the product is exact, so that rounding it or not makes no difference. */
static inline vf vf_add_exact_product(vf a, vf b, vf c) { return a * b + c; }

static inline vmask vf_gt(vf a, vf b) { return a > b; }
static inline uint32_t vmask_bits(vmask m) { return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u); }
static inline vf vf_blend(vmask m, vf yes, vf no) { return (vf)((m & (vi)yes) | (~m & (vi)no)); }
static inline vi vi_count(vi counter, vmask m) { return counter - m; }
static inline vi vi_max(vi a, vi b) { vmask m = a > b; return (m & a) | (~m & b); }
static inline vi vi_min(vi a, vi b) { vmask m = a < b; return (m & a) | (~m & b); }

static inline int32_t vi_reduce_max(vi v) {
    int32_t best = v[0];
    for (int k = 1; k < LANES; k++) best = v[k] > best ? v[k] : best;
    return best;
}
static inline int32_t vi_reduce_or(vi v) { return v[0] | v[1] | v[2] | v[3]; }

/* Lanes added in halves. */
static inline float vf_sum_halves(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }

/* The low byte of each lane. */
static inline __attribute__((always_inline)) void store_bytes(void *p, const vi *v, const int num) {
    uint8_t *bytes = p;
    for (int k = 0; k < num * LANES; k++) bytes[k] = (uint8_t)v[k / LANES][k % LANES];
}

/* To bytes from -127 to 127, the nearest of them. */
static inline __attribute__((always_inline)) void store_clamped(void *p, const vi *v, const int num) {
    int8_t *bytes = p;
    for (int k = 0; k < num * LANES; k++) {
        int32_t q = v[k / LANES][k % LANES];
        bytes[k] = (int8_t)(q < -127 ? -127 : q > 127 ? 127 : q);
    }
}

static inline void load_halves(float *out, const uint16_t *p, int n) {
    for (int i = 0; i < n; i++) out[i] = half_to_float(p[i]);
}
static inline void store_halves(uint16_t *p, const float *x, int n) {
    for (int i = 0; i < n; i++) p[i] = float_to_half(x[i]);
}

static inline vf vf_gather(const float *table, vi i) {
    return (vf){table[i[0]], table[i[1]], table[i[2]], table[i[3]]};
}

/* Bits of an index that a lookup in a register takes; 0 if there is none. */
#define LOOKUP_BITS 0
