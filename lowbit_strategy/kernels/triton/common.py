"""Device functions shared by the kernels: where a tile lies, scales, rounding, packing, random numbers.

A tile is K whole blocks of one segment. A block's elements are held as a tuple of parts ``[K, L]``, see
`lowbit_strategy.kernels.triton.layout.DeviceFormat`; numbers of a block are ``[K]``. Every float operation is the
one, in the order, that `lowbit_strategy.kernels.reference` has; comments say where a shorter form gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit_strategy.kernels.format import TERNARY_THRESHOLD
from lowbit_strategy.kernels.reference.rng import GOLDEN as _GOLDEN

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest even integer, in the low bits
BYTE = tl.constexpr(8388608.0)  # 2**23: a byte or'ed into its mantissa is that number
BYTE_BITS = tl.constexpr(0x4B000000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(0x00800000)
NAN_BITS = tl.constexpr(0x7FC00000)
THRESHOLD = tl.constexpr(TERNARY_THRESHOLD)
GOLDEN = tl.constexpr(_GOLDEN)


@triton.jit
def locate(segment_of_tile, rows, TILE: tl.constexpr):
    """The segment's row and the first element of this program's tile within it (64 bits)."""
    tile = tl.program_id(0)
    row = rows + tl.load(segment_of_tile + tile).to(tl.int64) * 6
    start = (tile.to(tl.int64) - tl.load(row + 5)) * TILE
    return row, start


@triton.jit
def wire_place(row, start, fmt: tl.constexpr, TILE: tl.constexpr):
    """Byte offsets of the tile's first codes and first scale in a source's wire, and the elements left (at most TILE)."""
    numel = tl.load(row + 1)
    wire = tl.multiple_of(tl.load(row + 3), 16)
    num_blocks = (numel + (fmt.block - 1)) // fmt.block
    first_block = start // fmt.block
    codes = wire + first_block * fmt.code_nbytes
    scales = wire + num_blocks * fmt.code_nbytes + first_block * 2
    return codes, scales, tl.minimum(numel - start, TILE).to(tl.int32)


@triton.jit
def is_plain(pointer, left, TILE: tl.constexpr):
    """Whether the tile is whole and its floats start on 16 bytes: then no access needs a mask."""
    return (left == TILE) & ((pointer.to(tl.int64) & 15) == 0)


@triton.jit
def offsets(STRIDE: tl.constexpr, K: tl.constexpr, L: tl.constexpr, VECTOR: tl.constexpr):
    """[K, L] places of L neighbours in each of K rows."""
    at = tl.arange(0, K)[:, None] * STRIDE + tl.arange(0, L)[None, :]
    return tl.max_contiguous(at, [1, VECTOR])


@triton.jit
def load_parts(pointer, left, fmt: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr, PLAIN: tl.constexpr):
    """Tuple of [K, L]; zeros beyond `left` elements unless PLAIN."""
    at = offsets(fmt.block, K, fmt.length, VECTOR)
    PARTS: tl.constexpr = fmt.parts
    parts = ()
    for p in tl.static_range(PARTS):
        if PLAIN:
            parts = parts + (tl.load(pointer + (at + p * fmt.length)),)
        else:
            parts = parts + (tl.load(pointer + (at + p * fmt.length), mask=at + p * fmt.length < left, other=0),)
    return parts


@triton.jit
def as_float32(parts):
    floats = ()
    for p in tl.static_range(len(parts)):
        if parts[p].dtype == tl.bfloat16:  # the upper half of a float32; by bits, denormals come through everywhere
            wide = parts[p].to(tl.int16, bitcast=True).to(tl.int32) << 16
            floats = floats + (wide.to(tl.float32, bitcast=True),)
        else:
            floats = floats + (parts[p].to(tl.float32),)
    return floats


@triton.jit
def signed_bytes(parts):
    """int8 to float32 without the slow conversion units: a byte in a mantissa."""
    floats = ()
    for p in tl.static_range(len(parts)):
        bits = (parts[p].to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x80) | BYTE_BITS
        floats = floats + (bits.to(tl.float32, bitcast=True) - (BYTE + 128.0),)
    return floats


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def largest_bits(parts):
    """int32 [K]: bits of the largest magnitude; above INFINITY if there is a NaN."""
    if len(parts) == 1:
        return tl.max(bits_of(parts[0]) & MAGNITUDE, axis=1)
    largest = tl.abs(parts[0])
    for p in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.abs(parts[p]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(bits_of(largest), axis=1)


@triton.jit
def any_nonzero(parts):
    """Bool [K]."""
    bits = bits_of(parts[0])
    for p in tl.static_range(1, len(parts)):
        bits = bits | bits_of(parts[p])
    return tl.max(bits & MAGNITUDE, axis=1) > 0


@triton.jit
def add_halves(parts, HALF: tl.constexpr):
    sums = ()
    for p in tl.static_range(HALF):
        sums = sums + (parts[p] + parts[p + HALF],)
    return sums


@triton.jit
def tree_sum(parts, K: tl.constexpr, L: tl.constexpr):
    """float32 [K]: first half plus second half, again and again; the same order on every backend."""
    if len(parts) == 8:
        parts = add_halves(parts, 4)
    if len(parts) == 4:
        parts = add_halves(parts, 2)
    if len(parts) == 2:
        parts = add_halves(parts, 1)
    total = parts[0]
    for i in tl.static_range(12):
        if (L >> i) > 1:
            total = tl.sum(tl.reshape(total, [K, 2, L >> (i + 1)]), axis=1)
    return tl.reshape(total, [K])


@triton.jit
def rows_left(left, BLOCK: tl.constexpr, K: tl.constexpr):
    """int32 [K]: elements of each block that are not padding."""
    here = left - tl.arange(0, K) * BLOCK
    return tl.minimum(tl.maximum(here, 0), BLOCK)


@triton.jit
def mean_of(total, left, fmt: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    if PLAIN:
        return total * (1.0 / fmt.block)  # dividing by a power of two: the same bits
    return tl.div_rn(total, tl.maximum(rows_left(left, fmt.block, K), 1).to(tl.float32))


@triton.jit
def root_mean_square(parts, largest, left, fmt: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    """Scaled by a power of two near the largest magnitude, so that squares neither overflow nor vanish."""
    exponent = tl.minimum(tl.maximum((largest >> 23) - 126, -120), 120)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    squares = ()
    for p in tl.static_range(len(parts)):
        unit = parts[p] * down[:, None]
        squares = squares + (unit * unit,)
    return tl.sqrt_rn(mean_of(tree_sum(squares, K, fmt.length), left, fmt, K, PLAIN)) * up


@triton.jit
def mean_magnitude(parts, left, fmt: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    sizes = ()
    for p in tl.static_range(len(parts)):
        sizes = sizes + (tl.abs(parts[p]),)
    mean = mean_of(tree_sum(sizes, K, fmt.length), left, fmt, K, PLAIN)
    if fmt.rule == "mean_abs":
        return mean
    above = sizes[0] > (mean * THRESHOLD)[:, None]  # ternary codes have one part
    total = tree_sum((tl.where(above, sizes[0], 0.0),), K, fmt.length)
    count = tl.maximum(tl.sum(above.to(tl.int32), axis=1), 1)
    return tl.div_rn(total, count.to(tl.float32))


@triton.jit
def absmax_scale(parts, INVERSE_QMAX: tl.constexpr):
    largest = largest_bits(parts)
    return settle_scale(largest.to(tl.float32, bitcast=True) * INVERSE_QMAX, largest)


@triton.jit
def block_scale(parts, left, fmt: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    """Scale float32 [K]: 0 where nothing can be said, NaN where not finite; and whether the block is finite."""
    if fmt.rule == "absmax":
        return absmax_scale(parts, fmt.inverse_qmax)
    largest = largest_bits(parts)
    if fmt.rule == "rms":
        return settle_scale(root_mean_square(parts, largest, left, fmt, K, PLAIN), largest)
    return settle_scale(mean_magnitude(parts, left, fmt, K, PLAIN), largest)


@triton.jit
def settle_scale(raw, largest):
    """Round up to bfloat16, flush below the smallest normal number, NaN for a block that is not finite."""
    bits = (bits_of(raw) + 0xFFFF) & -0x10000
    finite = (largest < INFINITY) & (bits < INFINITY)
    bits = tl.where(bits < SMALLEST_NORMAL, 0, bits)
    return tl.where(finite, bits, NAN_BITS).to(tl.float32, bitcast=True), finite


@triton.jit
def inverse(scale):
    """1 / scale, or 0 where the scale is 0 or NaN; and where it is neither, bool [K]."""
    usable = scale > 0
    return tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0), usable


@triton.jit
def hash32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stream_key(seed, salt, STREAM: tl.constexpr):
    return hash32(hash32(seed.to(tl.uint32) ^ salt.to(tl.uint32)) + STREAM)


@triton.jit
def dither(at, key):
    """float32 in [-0.5, 0.5) on a grid of 2**-24, from a hash of key and place.

    The top bit of the hash chooses the half, the next 23 are a mantissa: no integer conversion, no rounding.
    """
    x = hash32(at.to(tl.uint32) * GOLDEN + key)
    upper = ((x >> 8) & 0x7FFFFF) | 0x3F000000  # 0.5 + mantissa * 2**-24
    shift = ((x >> 8) & 0x800000) ^ 0xBF800000  # -1, or -0.5 with the top bit set
    return upper.to(tl.float32, bitcast=True) + shift.to(tl.float32, bitcast=True)


@triton.jit
def round_parts(
    parts, scale_inverse, first, key, QMAX: tl.constexpr, fmt: tl.constexpr, K: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """The uniform grid: integers as the low bits of int32, and as float32. Only dither can leave the range."""
    bits, values = (), ()
    for p in tl.static_range(len(parts)):
        y = parts[p] * scale_inverse[:, None]
        if STOCHASTIC:
            at = tl.arange(0, K)[:, None] * fmt.block + tl.arange(0, fmt.length)[None, :] + p * fmt.length
            y = y + dither(at.to(tl.uint32) + first.to(tl.uint32), key)
            y = tl.minimum(tl.maximum(y, -QMAX * 1.0), QMAX * 1.0)
        y = y + ROUND
        bits = bits + (bits_of(y),)
        values = values + (y - ROUND,)
    return bits, values


@triton.jit
def nearest_levels(parts, scale_inverse, table, fmt: tl.constexpr):
    """Fitted levels: codes int32, and the levels as float32."""
    codes, values = (), ()
    for p in tl.static_range(len(parts)):
        y = parts[p] * scale_inverse[:, None]
        code = tl.zeros_like(parts[p]).to(tl.int32)
        if len(fmt.levels) > 0:
            value = tl.zeros_like(y) + fmt.levels[0]
            for i in tl.static_range(len(fmt.thresholds)):
                above = y > fmt.thresholds[i]
                code += above.to(tl.int32)
                value = tl.where(above, fmt.levels[i + 1], value)
        else:
            for i in range(fmt.num_levels - 1):
                code += (y > tl.load(table + i)).to(tl.int32)
            value = tl.load(table + (fmt.num_levels - 1) + code)
        codes = codes + (code,)
        values = values + (value,)
    return codes, values
