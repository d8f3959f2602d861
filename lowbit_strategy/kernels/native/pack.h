/* Codes, one a byte, to the wire's packed bytes and back.
 *
 * Half-split: byte j of a plane of width w holds elements j, j + n, j + 2n ... of its n bytes, element j lowest. So
 * packing shifts and ors whole runs of codes, 16 at a time in 64-bit lanes: no code ever leaves its byte.
 */
#define PACK_SLACK 160 /* bytes behind a block's codes that may be touched: ternary's five runs of up to 31 */

typedef uint64_t word __attribute__((vector_size(16), may_alias));

#define EACH_BYTE(value) (0x0101010101010101u * (uint64_t)(value))

ALWAYS_INLINE word load_word(const uint8_t *p) { word v; memcpy(&v, p, sizeof v); return v; }
ALWAYS_INLINE void store_word(uint8_t *p, word v) { memcpy(p, &v, sizeof v); }

ALWAYS_INLINE void pack_plane(const uint8_t *codes, int block_size, uint8_t *out, int shift, const int width) {
    const int n = block_size * width / 8;
    const uint64_t mask = EACH_BYTE((1 << width) - 1);
    for (int j = 0; j < n; j += (int)sizeof(word)) {
        word packed = load_word(codes + j) >> shift & mask;
        for (int k = 1; k < 8 / width; k++) packed |= (load_word(codes + j + k * n) >> shift & mask) << (k * width);
        if (n >= (int)sizeof(word)) store_word(out + j, packed);
        else memcpy(out, &packed, (size_t)n);
    }
}

ALWAYS_INLINE void unpack_plane(const uint8_t *packed, int block_size, uint8_t *codes, int shift, const int width) {
    const int n = block_size * width / 8;
    const uint64_t mask = EACH_BYTE((1 << width) - 1);
    for (int j = 0; j < n; j += (int)sizeof(word)) {
        word bytes = {0}; /* where a plane is shorter, zeros are or-ed into the run behind */
        if (n >= (int)sizeof(word)) bytes = load_word(packed + j);
        else memcpy(&bytes, packed, (size_t)n);
        for (int k = 0; k < 8 / width; k++) {
            uint8_t *to = codes + j + k * n;
            store_word(to, load_word(to) | (bytes >> (k * width) & mask) << shift);
        }
    }
}

/* Five trits to a byte, in base 3; at most 242, so that bytes do not carry into each other. */
static void pack_ternary(const struct lowbit_format *fmt, uint8_t *codes, uint8_t *out) {
    const int n = fmt->code_nbytes;
    memset(codes + fmt->block_size, fmt->zero_code, (size_t)(5 * n - fmt->block_size));
    for (int j = 0; j < n; j += (int)sizeof(word)) {
        word packed = load_word(codes + j + 4 * n);
        for (int k = 3; k >= 0; k--) packed = packed + (packed << 1) + load_word(codes + j + k * n);
        if (n - j >= (int)sizeof(word)) store_word(out + j, packed);
        else memcpy(out + j, &packed, (size_t)(n - j));
    }
}

static void unpack_ternary(const struct lowbit_format *fmt, const uint8_t *packed, uint8_t *codes) {
    typedef uint16_t wide __attribute__((vector_size(16)));
    const int n = fmt->code_nbytes;
    for (int j = 0; j < n; j += (int)sizeof(word)) {
        word bytes = {0};
        if (n - j >= (int)sizeof(word)) bytes = load_word(packed + j);
        else memcpy(&bytes, packed + j, (size_t)(n - j));
        wide even = (wide)bytes & 0xFF, odd = (wide)bytes >> 8; /* bytes in 16-bit lanes, for the products */
        uint8_t *to = codes + j;
        for (int k = 0; k < 5; k++, to += n) {
            wide even_rest = even * 171 >> 9, odd_rest = odd * 171 >> 9; /* a third, exact below 256 */
            word trits = (word)((even - even_rest * 3) | (odd - odd_rest * 3) << 8);
            if (n - j >= (int)sizeof(word)) store_word(to, trits);
            else memcpy(to, &trits, (size_t)(n - j)); /* the run behind is not complete before the last j */
            even = even_rest;
            odd = odd_rest;
        }
    }
}

/* `codes` has PACK_SLACK bytes to spare, here and below. */
static inline void pack(const struct lowbit_format *fmt, uint8_t *codes, uint8_t *out) {
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

static inline void unpack(const struct lowbit_format *fmt, const uint8_t *packed, uint8_t *codes) {
    if (fmt->rule == RULE_TERNARY) {
        unpack_ternary(fmt, packed, codes);
        return;
    }
    int shift = 0, size = fmt->block_size;
    memset(codes, 0, (size_t)size + PACK_SLACK);
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
