/* Codes, one per byte, to the wire's packed bytes and back.
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

/* Exchanges the bits of x that `mask` has with those `shift` above them. */
#define SWAP_BITS(x, shift, mask) \
    do { \
        __typeof__(x) differs = ((x) ^ (x) >> (shift)) & (mask); \
        (x) ^= differs ^ differs << (shift); \
    } while (0)

/* Blocks of 32 or 64 codes of one bit, bit i of a block that of element i, to half-split bytes: bit k of byte j. Each
 * swap exchanges two digits of i, written in base 2. */
static void pack_bits(const uint8_t *codes, uint8_t *out, int block_size, int num_blocks) {
    uint64_t all[LOWBIT_MAX_BLOCK / 64];
    const size_t nbytes = (size_t)(block_size / 8 * num_blocks);
    memcpy(all, codes, nbytes);
    if (block_size == 64) {
        for (int b = 0; b < num_blocks; b++) {
            uint64_t x = all[b];
            SWAP_BITS(x, 7, 0x00AA00AA00AA00AAu);
            SWAP_BITS(x, 14, 0x0000CCCC0000CCCCu);
            SWAP_BITS(x, 28, 0x00000000F0F0F0F0u);
            all[b] = x;
        }
    } else {
        for (int b = 0; b < (num_blocks + 1) / 2; b++) { /* two at a time */
            uint64_t x = all[b];
            SWAP_BITS(x, 14, 0x0000CCCC0000CCCCu);
            SWAP_BITS(x, 7, 0x00AA00AA00AA00AAu);
            SWAP_BITS(x, 2, 0x0C0C0C0C0C0C0C0Cu);
            SWAP_BITS(x, 1, 0x2222222222222222u);
            all[b] = x;
        }
    }
    memcpy(out, all, nbytes);
}

/* Five trits to a byte, in base 3; at most 242, so that bytes do not carry into each other. Runs are as long as a block
 * has bytes, mostly no whole number of words: a word may write into what is behind, which is written after it. */
static void pack_ternary(const struct lowbit_format *fmt, uint8_t *codes, uint8_t *out, int num_blocks) {
    uint8_t packed[LOWBIT_MAX_BLOCK];
    const int n = fmt->code_nbytes;
    for (int b = 0; b < num_blocks; b++, codes += 5 * n) {
        memset(codes + fmt->block_size, fmt->zero_code, (size_t)(5 * n - fmt->block_size));
        for (int j = 0; j < n; j += (int)sizeof(word)) {
            word bytes = load_word(codes + j + 4 * n);
            for (int k = 3; k >= 0; k--) bytes = bytes + (bytes << 1) + load_word(codes + j + k * n);
            store_word(packed + b * n + j, bytes);
        }
    }
    memcpy(out, packed, (size_t)(num_blocks * n));
}

static void unpack_ternary(const struct lowbit_format *fmt, const uint8_t *wire, uint8_t *codes, int num_blocks) {
    typedef uint16_t wide __attribute__((vector_size(16)));
    uint8_t packed[LOWBIT_MAX_BLOCK];
    const int n = fmt->code_nbytes, words = (n + (int)sizeof(word) - 1) / (int)sizeof(word);
    memcpy(packed, wire, (size_t)(num_blocks * n));
    for (int b = 0; b < num_blocks; b++, codes += 5 * n) {
        for (int j = (words - 1) * (int)sizeof(word); j >= 0; j -= (int)sizeof(word)) {
            wide bytes = (wide)load_word(packed + b * n + j);
            wide even = bytes & 0xFF, odd = bytes >> 8; /* in 16-bit lanes, for the products */
            for (int k = 0; k < 5; k++) {
                wide even_rest = even * 171 >> 9, odd_rest = odd * 171 >> 9; /* a third, exact below 256 */
                store_word(codes + j + k * n, (word)((even - even_rest * 3) | (odd - odd_rest * 3) << 8));
                even = even_rest;
                odd = odd_rest;
            }
        }
    }
}

/* Bytes from one block's codes to the next one's. */
static inline int codes_stride(const struct lowbit_format *fmt) {
    return fmt->ternary ? 5 * fmt->code_nbytes : fmt->block_size;
}

#define EACH_BLOCK for (int b = 0; b < num_blocks; b++)

/* `codes` has PACK_SLACK bytes to spare, here and below. */
static void pack(const struct lowbit_format *fmt, uint8_t *codes, uint8_t *out, int num_blocks) {
    const int n = fmt->block_size, nbytes = fmt->code_nbytes;
    if (fmt->ternary) {
        pack_ternary(fmt, codes, out, num_blocks);
        return;
    }
    for (int p = 0, shift = 0; p < fmt->num_planes; shift += fmt->planes[p], p++) {
        switch (fmt->planes[p]) {
        case 8: memcpy(out, codes, (size_t)(n * num_blocks)); break;
        case 4: EACH_BLOCK pack_plane(codes + b * n, n, out + b * nbytes, shift, 4); break;
        case 2: EACH_BLOCK pack_plane(codes + b * n, n, out + b * nbytes, shift, 2); break;
        default: EACH_BLOCK pack_plane(codes + b * n, n, out + b * nbytes, shift, 1); break;
        }
        out += n * fmt->planes[p] / 8;
    }
}

static void unpack(const struct lowbit_format *fmt, const uint8_t *packed, uint8_t *codes, int num_blocks) {
    const int n = fmt->block_size, nbytes = fmt->code_nbytes;
    if (fmt->ternary) {
        unpack_ternary(fmt, packed, codes, num_blocks);
        return;
    }
    memset(codes, 0, (size_t)(n * num_blocks) + PACK_SLACK);
    for (int p = 0, shift = 0; p < fmt->num_planes; shift += fmt->planes[p], p++) {
        switch (fmt->planes[p]) {
        case 8: memcpy(codes, packed, (size_t)(n * num_blocks)); break;
        case 4: EACH_BLOCK unpack_plane(packed + b * nbytes, n, codes + b * n, shift, 4); break;
        case 2: EACH_BLOCK unpack_plane(packed + b * nbytes, n, codes + b * n, shift, 2); break;
        default: EACH_BLOCK unpack_plane(packed + b * nbytes, n, codes + b * n, shift, 1); break;
        }
        packed += n * fmt->planes[p] / 8;
    }
}
