#include "scalar.h"

#include "vec_portable.h"

#include "encode.h"
#include "decode.h"
#include "dense.h"

const struct lowbit_kernels lowbit_portable = {"portable", encode, decode_sum};
