/* What the Python bindings hand to C, and the table of kernels that each instruction set fills in.
 *
 * The definition of every byte is the plain PyTorch code in kernels/reference. To agree with it bit for bit, nothing
 * here may contract a multiply and an add into one operation or reorder a sum.
 */
#ifndef LOWBIT_H
#define LOWBIT_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LOWBIT_ABI 8 /* goes up when the structures change; __init__.py has the same number */

#define LOWBIT_MAX_BLOCK 4096
#define LOWBIT_MAX_CODEBOOK 256
#define LOWBIT_MIN_BLOCK 32

enum lowbit_rule { RULE_ABSMAX, RULE_RMS, RULE_MEAN_ABS };
enum lowbit_dtype { DTYPE_FLOAT32, DTYPE_BFLOAT16, DTYPE_FLOAT16 };
enum lowbit_residual { RESIDUAL_NONE, RESIDUAL_INT8, RESIDUAL_FLOAT32 };

/* BlockFormat. codebook_size is 0 for the uniform grid. */
struct lowbit_format {
    int32_t bits, block_size, rule, codebook_size, code_nbytes, zero_code, num_planes;
    int32_t ternary; /* three values, five codes to a byte */
    int32_t e2m1; /* floats of 4 bits */
    int32_t planes[4];
    float max_scale; /* the largest whose outermost value is finite */
    float top; /* the largest magnitude among the values, in units of the scale */
    float codebook[LOWBIT_MAX_CODEBOOK];
    float thresholds[LOWBIT_MAX_CODEBOOK];
};

/* One row of the segment table. */
struct lowbit_segment {
    int64_t x_offset, numel, state_offset, wire_offset, salt;
};

struct lowbit_call {
    const struct lowbit_format *format; /* NULL: floats are sent as they are, or as bfloat16; blocks are single elements */
    void *x; /* gradients of an encode, output of a decode */
    void *residual;
    uint16_t *residual_scale;
    uint8_t *wire;
    const struct lowbit_segment *segments;
    int64_t num_segments, wire_row_stride, num_sources;
    int32_t x_dtype, wire_dtype, residual_kind, reset, stochastic, stochastic_residual; /* wire_dtype: without a format */
    uint32_t seed;
    float beta_old, beta_new, alpha;
};

/* Work on blocks [first, last), counted through all segments in order. The encoder returns 1 if something was not
 * finite. */
struct lowbit_kernels {
    const char *name;
    int (*encode)(const struct lowbit_call *, int64_t first, int64_t last);
    void (*decode_sum)(const struct lowbit_call *, int64_t first, int64_t last);
};

extern const struct lowbit_kernels lowbit_portable;
#if defined(__x86_64__)
extern const struct lowbit_kernels lowbit_avx2, lowbit_avx512;
#endif

#endif
