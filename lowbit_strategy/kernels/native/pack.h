/* Codes, one a byte, to the wire's packed bytes and back. Plain loops over bytes: compilers vectorise them well.
 *
 * Half-split: byte j of a plane of width w holds elements j, j + n, j + 2n ... of its n bytes, element j lowest.
 */
#define PACK_SLACK 160 /* bytes behind the codes that ternary packing may touch: 5 * 32 */

ALWAYS_INLINE void pack_plane(const uint8_t *codes, int block_size, uint8_t *out, int shift, const int width) {
    int n = block_size * width / 8;
    const uint8_t mask = (uint8_t)((1 << width) - 1);
    for (int j = 0; j < n; j++) {
        uint8_t byte = 0;
        for (int k = 0; k < 8 / width; k++) byte |= (uint8_t)((codes[j + k * n] >> shift & mask) << (k * width));
        out[j] = byte;
    }
}

ALWAYS_INLINE void unpack_plane(const uint8_t *packed, int block_size, uint8_t *codes, int shift, const int width) {
    int n = block_size * width / 8;
    const uint8_t mask = (uint8_t)((1 << width) - 1);
    for (int k = 0; k < 8 / width; k++)
        for (int j = 0; j < n; j++) codes[j + k * n] |= (uint8_t)((packed[j] >> (k * width) & mask) << shift);
}

/* Five trits to a byte, in base 3. */
static void pack_ternary(const struct lowbit_format *fmt, uint8_t *codes, uint8_t *out) {
    uint8_t bytes[(LOWBIT_MAX_BLOCK + 4) / 5 + LOWBIT_GROUP];
    int n = fmt->code_nbytes, padded = (n + LOWBIT_GROUP - 1) / LOWBIT_GROUP * LOWBIT_GROUP;
    memset(codes + fmt->block_size, fmt->zero_code, (size_t)(5 * n - fmt->block_size));
    for (int j = 0; j < padded; j++) {
        const uint8_t *c = codes + j;
        bytes[j] = (uint8_t)(c[0] + 3 * c[n] + 9 * c[2 * n] + 27 * c[3 * n] + 81 * c[4 * n]);
    }
    memcpy(out, bytes, (size_t)n);
}

static void unpack_ternary(const struct lowbit_format *fmt, const uint8_t *packed, uint8_t *codes) {
    int n = fmt->code_nbytes;
    for (int j = 0; j < n; j++) {
        uint16_t left = packed[j];
        for (int k = 0; k < 5; k++) {
            uint16_t rest = (uint16_t)(left * 171u) >> 9; /* left / 3, for left < 256 */
            codes[j + k * n] = (uint8_t)(left - 3 * rest);
            left = rest;
        }
    }
}

/* `codes` has PACK_SLACK bytes to spare. */
static void pack(const struct lowbit_format *fmt, uint8_t *codes, uint8_t *out) {
    if (fmt->rule == RULE_TERNARY) {
        pack_ternary(fmt, codes, out);
        return;
    }
    int shift = 0, size = fmt->block_size;
    for (int p = 0; p < fmt->num_planes; p++) {
        int width = fmt->planes[p];
        switch (width) {
        case 8: memcpy(out, codes, (size_t)size); break;
        case 4: pack_plane(codes, size, out, shift, 4); break;
        case 2: pack_plane(codes, size, out, shift, 2); break;
        default: pack_plane(codes, size, out, shift, 1); break;
        }
        shift += width;
        out += size * width / 8;
    }
}

static void unpack(const struct lowbit_format *fmt, const uint8_t *packed, uint8_t *codes) {
    if (fmt->rule == RULE_TERNARY) {
        unpack_ternary(fmt, packed, codes);
        return;
    }
    int shift = 0, size = fmt->block_size;
    memset(codes, 0, (size_t)size);
    for (int p = 0; p < fmt->num_planes; p++) {
        int width = fmt->planes[p];
        switch (width) {
        case 8: memcpy(codes, packed, (size_t)size); break;
        case 4: unpack_plane(packed, size, codes, shift, 4); break;
        case 2: unpack_plane(packed, size, codes, shift, 2); break;
        default: unpack_plane(packed, size, codes, shift, 1); break;
        }
        shift += width;
        packed += size * width / 8;
    }
}
