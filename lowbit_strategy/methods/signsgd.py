"""SignSGD: signs of momentum, by majority vote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Arena, Codec, DenseCodec, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import SCALE_NBYTES, ternary, uniform
from lowbit_strategy.kernels.integers import BITS
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.reference.rng import CODE_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.code_sizes import check_codes
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Assignment, TwoPrecisionCompressor
from lowbit_strategy.methods._base.momentum import MomentumCodec
from lowbit_strategy.options.configuration import configuration

VoteScale = Literal["mean_abs", "one"]


@dataclass(frozen=True, slots=True)
class SignCodec(BlockwiseCodec):
    """Sends signs, eight to a byte, and the block's mean magnitude. The sign of a zero is random."""

    block_size: int = 256

    @property
    def block_nbytes(self) -> int:
        return self.block_size // 8 + SCALE_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        mean_K = tree_sum(h_KB.abs() / valid_KB.sum(-1, keepdim=True))
        mean_K = torch.where(finite_K, mean_K, torch.nan).to(torch.bfloat16)
        zero_KB = (h_KB == 0) & valid_KB
        if zero_KB.is_cuda or bool(zero_KB.any()):  # on a GPU the check costs more than the noise
            h_KB = torch.where(zero_KB, noise(CODE_STREAM), h_KB)
        return torch.cat([BITS.pack((h_KB >= 0).byte()), mean_K[:, None].view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        mean_K1 = self.trailer(payload_KC, SCALE_NBYTES, torch.bfloat16).float()
        return torch.where(BITS.unpack(payload_KC[:, :-SCALE_NBYTES]).bool(), mean_K1, -mean_K1)


@dataclass(frozen=True, slots=True)
class VoteCodec(StatefulCodec):
    """Sends signs to the owner, which takes the sign of their sum. Blocks of zeros abstain.

    If a rank's block is not finite, neither is the result.
    """

    codec: SignCodec
    scale: VoteScale

    @property
    def label(self) -> str:
        return f"signs, majority vote, blocks of {self.block_size}"

    def arenas(self) -> dict[str, Arena]:
        return {}

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        self.codec.encode_(x, wire, segments, {}, step, flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        packed = pack_segments(segments, self.block_size)
        votes = torch.zeros(packed.numel, dtype=torch.float32, device=out.device)
        size = torch.zeros_like(votes)
        for sent in self.codec.decode_rows(wire_WB, segments):
            votes += sent.sign()
            size += sent.abs()
        if self.scale == "one":
            size = torch.where(size.isfinite(), float(wire_WB.shape[0]), torch.nan)
        packed.spread_(torch.where(size.isfinite(), votes.sign(), torch.nan) * size * alpha, out)


@configuration
class SignSGD(TwoPrecisionCompressor):
    """Majority vote: the sign of the sum of the ranks' signs.

    1. every rank sends the signs of its gradient, eight to a byte, with the mean magnitude of each block; with
       `momentum` the signs of its average ``m = momentum * m + (1 - momentum) * g`` (Signum)
    2. the owner takes ``sign(sum of signs)``; a tie is 0. A zero votes at random; a block of zeros abstains
    3. the result's magnitude is the ranks' average mean magnitude (``scale="mean_abs"``), which keeps learning rates
       and the proportion to exempt parameters, or 1 as published
    4. DDP only: the owner sends the vote back in three values, five to a byte (1.6 bits), with a scale per block

    It is biased and stateless: if ranks disagree mostly because of noise, it does not converge to the optimum.
    `EFSignSGD` and LoCo at 1 bit do better for the same bytes. Exempt and high-precision parameters have the same
    momentum, sent uncompressed and at `high_precision_bits`.

    Args:
        block_size: Elements that share a magnitude, a power of two.
        scale: ``mean_abs`` or ``one``.
        momentum: Weight of the old average, in [0, 1). 0: ranks vote with gradients; the paper uses 0.9, which costs 4
            bytes per parameter on every rank. The optimizer should then have no momentum (``SGD(momentum=0)``).

    References:
        Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", 2019, arXiv
        1810.05291, algorithm 1, which votes with the signs of local momenta.
    """

    name: ClassVar[str] = "signsgd"

    block_size: int = 256
    scale: VoteScale = "mean_abs"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")

    def exempted(self, spec: TensorSpec) -> Assignment | None:
        assignment = super().exempted(spec)
        return None if assignment is None else assignment._replace(method=self._averaged(DenseCodec()))

    def method(self, spec: TensorSpec) -> CodecPair:
        return self._averaged(VoteCodec(SignCodec(self.block_size), self.scale), BlockCodec(ternary(self.block_size)))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._averaged(BlockCodec(uniform(self.high_precision_bits, self.block_size), "stochastic"))

    def _averaged(self, codec: Codec, downlink: Codec | None = None) -> CodecPair:
        """Code the average, if there is a momentum, and the mean with `downlink`; None: the same codec."""
        averaged = MomentumCodec(momentum=self.momentum, averaged=True, codec=codec) if self.momentum else codec
        return CodecPair(averaged, downlink or codec)
