/* Scales of blocks of NaN and inf: run under the undefined behavior sanitizer by test_native. */
#include <stdio.h>

#include "scalar.h"

#include "vec_portable.h"

#include "block.h"
#include "scale.h"

int main(void) {
    static float scale[BATCH_BLOCKS], inverse[BATCH_BLOCKS];
    static int32_t largest[BATCH_BLOCKS];
    const uint32_t patterns[] = {0x7FFFFFFFu, 0x7F800000u, 0x7F7FFFFFu, 0x00000001u};
    for (int b = 0; b < BATCH_BLOCKS; b++) memcpy(largest + b, patterns + b % 4, 4);
    absmax_scales(scale, inverse, largest, BATCH_BLOCKS, 7, 0x1p124f, 0);
    for (int b = 0; b < 4; b++) printf("%08x\n", bits_of(scale[b]));
    return 0;
}
