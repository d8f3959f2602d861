"""QSGD: unbiased rounding to an even grid, without a residual."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.code_sizes import check_codes
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import TwoPrecisionCompressor
from lowbit_strategy.options.configuration import configuration


@configuration
class QSGD(TwoPrecisionCompressor):
    """Rounds every bucket at random, without bias, to an even grid between minus and plus its norm.

    With ``s = 2**(bits-1) - 1``, for each bucket v:

    1. ``Q(v_i) = norm(v) / s * sign(v_i) * xi_i``, ``xi_i = floor(s |v_i| / norm) + Bernoulli(frac)``
    2. codes and the bucket's norm go to the owner, which adds all ranks' Q in float32 and divides by W
    3. DDP only: the owner quantizes the mean again, with `return_bits`, and sends it back. That error is not averaged
       over ranks, so at 2 or 3 bits a wider downlink is worth its bytes.

    Args:
        bits: Bits per code, 2 to 8. One bit fewer means four times the variance.
        block_size: Elements of a bucket, a power of two. Smaller: less variance, 16 / block_size more bits per element.
        return_bits: Bits per code on the downlink; None: `bits`.

    References:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
        arXiv 1610.02132, section 3, with the maximum norm, which has less variance than the Euclidean one, and without
        Elias coding: codes have a fixed width.
    """

    name: ClassVar[str] = "qsgd"

    bits: int = 4
    block_size: int = 128
    return_bits: int | None = None

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        check_codes(
            self.block_size,
            bits=self.bits,
            high_precision_bits=self.high_precision_bits,
            return_bits=self.return_bits,
        )

    def codec(self, bits: int) -> Codec:
        return BlockCodec(uniform(bits, self.block_size), "stochastic")

    def method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(self.codec(self.bits), self.codec(self.return_bits or self.bits))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(self.codec(max(self.bits, self.high_precision_bits)))
