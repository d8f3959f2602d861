"""EF-signSGD: one bit per element and a mean magnitude per block, with error feedback."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import BlockFormat, uniform
from lowbit_strategy.methods._base.code_sizes import check_codes
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import TwoPrecisionCompressor
from lowbit_strategy.methods._base.residuals import ResidualDtype
from lowbit_strategy.methods.loco import LoCoCodec
from lowbit_strategy.options.configuration import configuration


@configuration
class EFSignSGD(TwoPrecisionCompressor):
    """One bit per element, with full error feedback on both hops.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``p = g + e``
    2. send ``Q = mean|p| * sign(p)``
    3. ``e' = p - Q``

    The fused LoCo kernel with 1-bit codes and beta 0 does this in one pass.

    Args:
        block_size: Elements that share a magnitude, a power of two; the paper uses a whole layer. Smaller: less error,
            16 / block_size more bits.
        residual: ``float32`` costs 4 bytes per parameter on every rank and keeps the error exactly; ``int8`` costs 1.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
        arXiv 1901.09847, algorithm 1; on both hops: Zheng, Huang, Kwok, 2019, arXiv 1905.10936.
    """

    name: ClassVar[str] = "efsignsgd"

    block_size: int = 256
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)

    def _codecs(self, fmt: BlockFormat) -> CodecPair:
        stateful = LoCoCodec(
            codec=BlockCodec(fmt),
            beta=0.0,
            reset_steps=None,
            residual=self.residual,
            residual_rounding="stochastic",
        )
        return CodecPair(stateful)

    def method(self, spec: TensorSpec) -> CodecPair:
        signs = BlockFormat(bits=1, block_size=self.block_size, scale_rule="mean_abs", codebook=(-1.0, 1.0))
        return self._codecs(signs)

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._codecs(uniform(self.high_precision_bits, self.block_size))
