"""EDEN: rotated blocks at one to four bits, each with the scale that keeps its own direction exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.eden import EdenCodec
from lowbit_strategy.collectives.stateful_codec import StatefulCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_codes
from lowbit_strategy.methods._base.stateful_codec import PlainCodec
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._residual_rules.feedback import FeedbackCodec, ResidualDtype
from lowbit_strategy.options.configuration import configuration

_BITS = (1, 2, 3, 4)


@configuration
class EDEN(Compressor):
    """Every block is rotated, coded with values fitted to a Gaussian, and scaled so that its own direction is kept.

    For each block x, on every rank, and again at the owner for the mean (DDP):

    1. ``y = H D x / sqrt(n)`` with the Hadamard matrix H and fixed random signs D
    2. ``c``: y in units of its root mean square, rounded to the nearest of 2**bits values (Lloyd-Max)
    3. c and ``S = |x|^2 / <y, c>`` are sent; the sum of all ranks' ``S c`` is rotated back once

    At one bit this is DRIVE: signs, and ``S = |x|^2 / |y|_1``. In the publications D is drawn anew for every message,
    which makes the estimate unbiased without a residual. Here it is fixed, so that ranks' sums are rotated back
    together, and LoCo's moving average of the error takes care of what that leaves.

    Args:
        bits: Of a code, 1 to 4.
        block_size: Elements that are rotated together and share S (bfloat16), a power of two from 32. Larger: closer to
            a Gaussian, fewer scales, a longer rotation.
        return_bits: Of the downlink; None takes `bits`.
        beta: Weight of the old error in the residual, as LoCo's, on both hops. 0: classic error feedback, with the
            scale of least error. None: no residual; a constant gradient is then never met exactly.
        residual: Where `beta` is given: ``float32`` costs 4 bytes per parameter on every rank, ``int8`` one.
        high_precision_bits: Of embeddings and output heads.
        exempt, high_precision: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", 2021, arXiv 2105.08339, section 4;
        Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
        2022, arXiv 2108.08842, section 3.
    """

    name: ClassVar[str] = "eden"

    bits: int = 1
    block_size: int = 128
    return_bits: int | None = None
    beta: float | None = 0.8
    residual: ResidualDtype = "float32"
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        for field in ("bits", "return_bits"):
            if (bits := getattr(self, field)) not in _BITS and (field == "bits" or bits is not None):
                raise ValueError(f"{field} must be an integer from 1 to 4, got {bits!r}")
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)
        if self.beta is not None and not 0.0 <= self.beta < 1.0:
            raise ValueError(f"beta must be in [0, 1) or None for no residual, got {self.beta!r}")

    def conserving(self) -> EDEN:
        return replace(self, residual="float32")

    def _stateful(self, bits: int) -> StatefulCodec:
        codec = EdenCodec(bits, self.block_size)
        return self._with_residual(codec.nearest() if self.beta == 0.0 else codec)

    def _with_residual(self, codec: Codec) -> StatefulCodec:
        if self.beta is None:
            return PlainCodec(codec)
        return FeedbackCodec(codec=codec, beta=self.beta, residual=self.residual)

    def method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(self._stateful(self.bits), self._stateful(self.return_bits or self.bits))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        stateful = self._with_residual(BlockCodec(uniform(self.high_precision_bits, self.block_size), "stochastic"))
        return CodecPair(stateful, stateful)
