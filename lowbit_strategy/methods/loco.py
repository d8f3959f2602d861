"""LoCo: 4-bit gradients with a moving average of the compression error, kept in 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from lowbit_strategy import leaves
from lowbit_strategy.codecs.base import Arena, Codec, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.codecs.block import BlockCodec, Rounding
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.blocks import encode_
from lowbit_strategy.kernels.codebooks import gaussian_codebook, lloyd_max, unbiased_lloyd_max
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, e2m1, uniform
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.code_sizes import check_bits
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import REFERENCE, TwoPrecisionCompressor
from lowbit_strategy.methods._base.residuals import ResidualDtype, residual_arenas
from lowbit_strategy.options.configuration import configuration

ROTATED = 32  # elements rotated together without a residual, as in SDP4Bit
Codebook = Literal["uniform", "e2m1", "fitted", "unit_gain", "ternary_unit_gain"]
_Make = Callable[[int, int], BlockFormat]
_FORMATS: Mapping[Codebook, tuple[range, _Make]] = {  # possible bits, and the format by bits and block size
    "uniform": (range(2, 9), uniform),
    "e2m1": (range(4, 5), lambda bits, block_size: e2m1(block_size)),
    "fitted": (range(1, 5), lloyd_max),
    "unit_gain": (range(1, 5), lambda bits, block_size: unbiased_lloyd_max(2**bits, block_size)),
    "ternary_unit_gain": (range(2, 3), lambda bits, block_size: unbiased_lloyd_max(3, block_size)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoCoCodec(StatefulCodec):
    """A codec with LoCo's residual, coded by the fused kernel. Fields are those of `LoCo`."""

    in_one_pass: ClassVar[bool] = True

    codec: BlockCodec
    beta: float
    reset_steps: int | None
    residual: ResidualDtype
    residual_rounding: Rounding

    @property
    def fmt(self) -> BlockFormat:
        return self.codec.fmt

    @property
    def label(self) -> str:
        fmt = self.fmt
        kind = "ternary" if fmt.is_ternary else f"{fmt.bits}-bit"
        if fmt.is_e2m1:
            kind += " E2M1"
        if fmt.codebook is not None and fmt.scale_rule == "rms":
            kind += " fitted" if fmt.codebook == gaussian_codebook(len(fmt.codebook)) else " of unit gain"
        return f"loco {kind}, blocks of {fmt.block_size}"

    @property
    def residual_gain(self) -> float:
        return 1.0 - self.beta

    def arenas(self) -> dict[str, Arena]:
        return residual_arenas(self.residual)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        feedback = Feedback(
            state["residual"],
            state.get("residual_scale"),
            self.beta,
            reset=self.reset_steps is not None and step.index > 0 and step.index % self.reset_steps == 0,
            stochastic=self.residual_rounding == "stochastic",
        )
        encode_(x, wire, segments, self.fmt, flag=flag, seed=step.seed, feedback=feedback)


@configuration
class LoCo(TwoPrecisionCompressor):
    """Low-bit gradients whose error is fed back through a moving average.

    Every step, for each block of each parameter, on every rank:

    1. ``h = g + e``
    2. ``s = absmax(h) / (2**(bits-1) - 1)``, ``q = clamp(round(h / s))``; q and s go to the block's owner
    3. ``e' = beta * e + (1 - beta) * (h - q * s)``, kept as int8 with a scale per block
    4. the owner adds all ranks' ``q * s`` in float32 and divides by W
    5. DDP only: the owner sends the mean back in the same way (the downlink), with its own residual

    Step 2 is the published one, ``codebook="uniform"``. An even grid is as coarse for a block's small elements as for
    its largest. Its noise can exceed a small element, and Adam, which divides by each element's root mean square, then
    takes smaller steps for it. So at 4 bits the default is ``codebook="e2m1"``, 4-bit floats: ``s = absmax(h) / 12``,
    and q is 0, 1, 2, 3, 4, 6, 8 or 12 with a sign. In the same bytes, these are 1.7 times finer for small elements and
    coarser for the few largest.

    Below 4 bits an even grid wastes its few values on the tails. ``codebook="fitted"`` has the Lloyd-Max values of a
    Gaussian, in units of the block's root mean square; the clipped part is fed back. They minimize the error, and
    shrink what they send: 1 bit sends 0.64 of a Gaussian, 0.41 after two hops. The average in step 3 adds the rest,
    ``1 / ((1 - beta) * 0.64)`` steps late. ``unit_gain`` has the fitted values divided by that share: the whole
    gradient is sent at once, with more noise, and the average holds only noise. ``ternary_unit_gain`` has three such
    values, five to a byte (1.6 bits). At 1 bit neither contracts every block: in a block of 64 with a single nonzero
    element, the error has more energy than the block. The average in step 3 absorbs this; plain feedback would not.

    Args:
        bits: Bits per code: 2 to 8 for uniform codes, 4 for E2M1, 1 to 4 for fitted and unit-gain codes, 2 for ternary
            ones. Fewer bits: fewer bytes, more error to feed back.
        codebook: Values of the codes, as above. None: ``e2m1`` at 4 bits; ``uniform`` at other bits and without a
            residual.
        block_size: Elements that share a scale, a power of two. Smaller: less error, 16 / block_size more bits.
        beta: Weight of the old error in the residual, in [0, 1). 0: classic error feedback. Larger: smoother noise,
            slower response.
        reset_steps: Optimizer steps between two resets of the residual; None: never. A reset loses the residual's
            content. Below 4 bits that is the sum of three to four gradients, so use None there.
        residual: ``int8``, with a scale per block, costs 1 byte per parameter on every rank; ``float32`` costs 4 and
            stores the average exactly. ``none`` costs nothing: codes are rounded stochastically and blocks are rotated
            by a Hadamard matrix, so that errors average out over steps and ranks instead of being fed back. The
            rotation runs in plain PyTorch outside the kernels, which is slower.
        residual_rounding: How the int8 residual is rounded. ``nearest``: a fifth faster, and measured to be as good;
            ``stochastic``: keeps increments below half a step on average.
        return_beta: `beta` of the owner's residual on the downlink.
        return_bits, return_codebook, return_block_size: `bits`, `codebook` and `block_size` of the downlink; None: the
            uplink's. At least `bits`, and for high-precision parameters at least the uplink's codes, because the
            downlink's error is the same on all ranks and does not average out.

    References:
        Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024, arXiv 2407.04480,
        equations of sections 3 and 4. Codebook: Lloyd, 1957/1982; Max, 1960. Without a residual:
        SDP4Bit, 2024, arXiv 2410.15526, section 3.3.
    """

    name: ClassVar[str] = "loco"

    bits: int = 4
    codebook: Codebook | None = None
    block_size: int = 128
    beta: float = 0.8
    reset_steps: int | None = 512
    residual: Literal["int8", "float32", "none"] = "int8"
    residual_rounding: Rounding = "nearest"
    return_beta: float = 0.0
    return_bits: int | None = None
    return_codebook: Codebook | None = None
    return_block_size: int | None = None

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        self._check_codebook("codebook", self._values(self.codebook, self.bits), self.bits)
        check_bits("high_precision_bits", self.high_precision_bits)
        bits, codebook, _ = self._downlink
        self._check_codebook("return_codebook", codebook, bits)
        if bits < self.bits:
            raise ValueError(
                f"return_bits must be at least bits, {self.bits}, got {bits}: the mean would come back "
                "in a coarser code than the gradients are sent in"
            )
        if self.residual == "none" and not {self.codebook, codebook} <= {"uniform", None}:
            raise ValueError("codebook must be 'uniform' with residual='none': others cannot be sent without bias")
        for field in ("beta", "return_beta"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} must be in [0, 1), got {getattr(self, field)!r}")
        if self.reset_steps is not None and self.reset_steps < 1:
            raise ValueError(f"reset_steps must be a positive integer or None, got {self.reset_steps!r}")
        self.method(REFERENCE)  # checks the block sizes

    def _check_codebook(self, field: str, codebook: Codebook, bits: int) -> None:
        known, _ = _FORMATS[codebook]
        prefix = field.removesuffix("codebook")
        if bits not in known:
            choice = f"{known[0]}" if len(known) == 1 else f"an integer from {known[0]} to {known[-1]}"
            hint = f", or {field}='fitted'" if bits == 1 else ""
            raise ValueError(f"{prefix}bits must be {choice} with {field}={codebook!r}{hint}, got {bits!r}")

    def _values(self, codebook: Codebook | None, bits: int) -> Codebook:
        """The codebook, or its default."""
        evenly = self.residual == "none"  # stochastic rounding needs an even grid
        return codebook or ("e2m1" if bits == 4 and not evenly else "uniform")

    @property
    def fmt(self) -> BlockFormat:
        """The uplink's format for parameters that are neither exempt nor high-precision."""
        _, make = _FORMATS[self._values(self.codebook, self.bits)]
        return make(self.bits, self.block_size)

    @property
    def _downlink(self) -> tuple[int, Codebook, int]:
        """Bits, codebook and block size."""
        bits = self.bits if self.return_bits is None else self.return_bits
        return (
            bits,
            self._values(self.return_codebook or self.codebook, bits),
            self.block_size if self.return_block_size is None else self.return_block_size,
        )

    def _return_format(self, codes: BlockFormat) -> BlockFormat:
        """The downlink's format, given the uplink's `codes`."""
        bits, codebook, block_size = self._downlink
        _, make = _FORMATS[codebook]
        chosen = make(bits, block_size)
        return codes if bits < codes.bits or chosen == self.fmt else chosen

    @functools.cache  # noqa: B019 (configurations are few, and live as long as the process)
    def _codecs(self, uplink_format: BlockFormat | None = None) -> CodecPair:
        """The codecs of both hops for this uplink format; None: for `fmt`."""
        uplink_format = self.fmt if uplink_format is None else uplink_format
        return_format = self._return_format(uplink_format)
        if self.residual == "none":
            return CodecPair(_unbiased(uplink_format), _unbiased(return_format))
        uplink = LoCoCodec(
            codec=BlockCodec(uplink_format),
            beta=self.beta,
            reset_steps=self.reset_steps,
            residual=self.residual,
            residual_rounding=self.residual_rounding,
        )
        return CodecPair(uplink, replace(uplink, codec=BlockCodec(return_format), beta=self.return_beta))

    def method(self, spec: TensorSpec) -> CodecPair:
        return self._codecs()

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._codecs(uniform(max(self.bits, self.high_precision_bits), self.block_size))


def _unbiased(codes: BlockFormat) -> Codec:
    """The codec of a hop without a residual."""
    rotated: Codec = leaves.load("lowbit_strategy.methods.zoo.rotated:RotatedCodec", "residual='none'")(
        BlockCodec(codes, "stochastic"), ROTATED
    )
    return rotated
