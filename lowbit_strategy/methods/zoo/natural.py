"""Natural compression: magnitudes rounded at random to powers of two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.block import Rounding
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import BlockFormat, uniform
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import CODE_STREAM
from lowbit_strategy.methods._base.code_sizes import check_codes
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.configuration import configuration

_EXPONENT_BIAS = 126  # the byte of exponents -125 ... 128; 0 stands for an all-zero block, 255 for a non-finite one
_NOT_FINITE = 255


@dataclass(frozen=True, slots=True)
class NaturalCodec(BlockwiseCodec):
    """Powers of two up to a block's largest magnitude, as in `NaturalCompression`.

    With ``K = 2**(bits-1) - 1`` and ``2**E`` the smallest power of two not below that magnitude, the code is the sign
    and the exponent's distance from ``E - K``, 0 for zero; then one byte for ``E``. With `rounding` ``nearest`` it is
    the nearer of the two powers, or of 0 and the smallest value.
    """

    bits: int = 4
    block_size: int = 128
    rounding: Rounding = "stochastic"

    @property
    def label(self) -> str:
        return f"natural {self.bits}-bit, blocks of {self.block_size}"

    def nearest(self) -> NaturalCodec:
        return replace(self, rounding="nearest")

    @property
    def fmt(self) -> BlockFormat:
        return uniform(self.bits, self.block_size)

    @property
    def num_powers(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def block_nbytes(self) -> int:
        return self.fmt.code_nbytes + 1

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        magnitude_KB = h_KB.abs()
        top_K = _ceil_log2(magnitude_KB.amax(-1))
        usable_K = top_K > -_EXPONENT_BIAS
        uniform_KB: Tensor | float = noise(CODE_STREAM) + 0.5 if self.rounding == "stochastic" else 0.5
        mantissa_KB, exponent_KB = torch.frexp(magnitude_KB)  # mantissa in [0.5, 1): the power below is 2**(exponent-1)
        power_KB = exponent_KB - 1 + (uniform_KB < 2.0 * mantissa_KB - 1.0).int()
        number_KB = power_KB - (top_K - self.num_powers)[:, None]
        smallest_K = top_K - self.num_powers + 1
        is_small_KB = exponent_KB - 1 < smallest_K[:, None]
        relative_KB = torch.ldexp(magnitude_KB, (-smallest_K)[:, None])
        number_KB = torch.where(is_small_KB, (uniform_KB < relative_KB).int(), number_KB)
        number_KB = torch.where(usable_K[:, None] & (magnitude_KB > 0), number_KB, 0)
        codes_KB = number_KB | ((h_KB < 0) & (number_KB > 0)).int() << (self.bits - 1)
        exponent_byte_K = torch.where(usable_K, top_K + _EXPONENT_BIAS, 0)
        exponent_byte_K = torch.where(finite_K, exponent_byte_K, _NOT_FINITE)
        packed_KC = blocks.pack(codes_KB.to(torch.uint8), self.fmt)
        return torch.cat([packed_KC, exponent_byte_K.to(torch.uint8)[:, None]], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        codes_KB = blocks.unpack(payload_KC[:, :-1], self.fmt).int()
        top_K = payload_KC[:, -1].int()
        number_KB = codes_KB & self.num_powers
        exponent_KB = (number_KB + (top_K - _EXPONENT_BIAS - self.num_powers)[:, None]).clamp(max=127)
        values_KB = torch.ldexp(torch.ones_like(codes_KB, dtype=torch.float32), exponent_KB)
        values_KB = torch.where(codes_KB > self.num_powers, -values_KB, values_KB)
        values_KB = torch.where((number_KB > 0) & (top_K > 0)[:, None], values_KB, 0.0)
        return torch.where((top_K == _NOT_FINITE)[:, None], torch.nan, values_KB)


def _ceil_log2(x_K: Tensor) -> Tensor:
    """int32: the smallest e with ``x <= 2**e``; below the range of exponent bytes for zeros and denormals."""
    mantissa_K, exponent_K = torch.frexp(x_K)
    ceiling_K = exponent_K - (mantissa_K == 0.5).int()
    return torch.where(x_K < torch.finfo(torch.float32).tiny, -_EXPONENT_BIAS, ceiling_K)


@configuration
class NaturalCompression(Compressor):
    """Sends only signs and exponents.

    1. ``2**e <= |g| < 2**(e+1)`` becomes ``2**(e+1)`` with probability ``|g| / 2**e - 1``, else ``2**e``
    2. the owner adds all ranks' values in float32 and divides by W
    3. DDP only: the owner rounds the mean the same way, with its own randomness, and sends it back

    Unbiased, second moment at most 9/8 of the input's. The publication sends 9 bits, sign and exponent. Here the
    exponent counts from the block's largest: 8 bits reach ``2**-126`` of it and lose nothing in practice; with fewer,
    smaller values become 0 or the smallest power, still without bias (the publication's natural dithering).

    Args:
        bits: Bits per code, 2 to 8.
        block_size: Elements that share the byte of the largest exponent, a power of two.

    References:
        Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv 1905.10988, definitions 1, 2.
    """

    name: ClassVar[str] = "naturalcompression"

    bits: int = 8
    block_size: int = 512

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_codes(self.block_size, bits=self.bits)

    def method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(NaturalCodec(self.bits, self.block_size))
