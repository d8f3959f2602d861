"""Natural compression: unbiased rounding to powers of two."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.natural import NaturalCodec
from lowbit_strategy.methods._base.codec_pair import CodecPair, plain_pair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_codes
from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


@configuration
class NaturalCompression(Compressor):
    """Only signs and exponents travel.

    1. ``2**e <= |g| < 2**(e+1)`` becomes ``2**(e+1)`` with probability ``|g| / 2**e - 1``, else ``2**e``
    2. the owner adds all ranks' values in float32 and divides by W
    3. DDP only: the owner rounds the mean the same way, with its own randomness, and sends it back

    Unbiased, second moment at most 9/8 of the input's. The publication sends 9 bits, sign and exponent; here the
    exponent counts from the block's largest, so 8 bits reach ``2**-126`` of it and lose nothing in practice, and fewer
    bits make smaller values 0 or the smallest power, still without bias (the publication's natural dithering).

    Args:
        bits: A code has so many, 2 to 8.
        block_size: Elements that share the byte of the largest exponent, a power of two.
        exempt, high_precision: Which parameters; see `Compressor`. There is no method of higher precision.

    Raises:
        ValueError: A field is out of range.

    References:
        Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv 1905.10988, definitions 1, 2.
    """

    name: ClassVar[str] = "naturalcompression"

    bits: int = 8
    block_size: int = 512
    high_precision: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_codes(self.block_size, bits=self.bits)

    def method(self, spec: TensorSpec) -> CodecPair:
        return plain_pair(NaturalCodec(self.bits, self.block_size))
