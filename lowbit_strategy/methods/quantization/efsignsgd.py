"""EF-signSGD: scaled signs with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lowbit_strategy.kernels.format import BlockFormat, uniform
from lowbit_strategy.methods._base.base import Compressor, LanePair
from lowbit_strategy.methods._base.option_checks import check_bits, check_block_size, check_choice
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.quantization.loco import LoCoLane, ResidualDtype


@dataclass(frozen=True, kw_only=True, slots=True)
class EFSignSGD(Compressor):
    """One bit an element, the error fed back in full, both ways.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``p = g + e``
    2. send ``Q = mean|p| * sign(p)``
    3. ``e' = p - Q``

    The fused LoCo kernel with 1-bit codes and beta 0 does it in one pass.

    Args:
        block_size: Elements that share a magnitude, a power of two; the publication has one a layer. Smaller: less
            error, 16 / block_size bits more.
        residual: ``float32`` costs 4 bytes a parameter and keeps the error exactly; ``int8`` costs 1.
        milder_bits: Of embeddings and output heads.
        exempt, milder: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
        arXiv 1901.09847, algorithm 1; both ways: Zheng, Huang, Kwok, 2019, arXiv 1905.10936.
    """

    name: ClassVar[str] = "efsignsgd"

    block_size: int = 256
    residual: ResidualDtype = "float32"
    milder_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_block_size(self.block_size)
        check_choice("residual", self.residual, ("float32", "int8"))
        check_bits("milder_bits", self.milder_bits)

    def conserving(self) -> EFSignSGD:
        return replace(self, residual="float32")

    def _lanes(self, fmt: BlockFormat) -> LanePair:
        lane = LoCoLane(
            fmt=fmt,
            beta=0.0,
            reset_steps=None,
            residual=self.residual,
            rounding="nearest",
            residual_rounding="stochastic",
        )
        return LanePair(lane, lane)

    def method(self, spec: TensorSpec) -> LanePair:
        signs = BlockFormat(bits=1, block_size=self.block_size, scale_rule="mean_abs", levels=(-1.0, 1.0))
        return self._lanes(signs)

    def milder_method(self, spec: TensorSpec) -> LanePair:
        return self._lanes(uniform(self.milder_bits, self.block_size))
