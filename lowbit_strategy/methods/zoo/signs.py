"""One bit per element: signs with error feedback, with two means, or by majority vote."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Arena, Codec, DenseCodec, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.codecs.block import BlockCodec, BlockwiseCodec, Noise, trailer
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import SCALE_NBYTES, BlockFormat, ternary, uniform
from lowbit_strategy.kernels.integers import pack_bits, unpack_bits
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.reference.rng import CODE_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, check_codes
from lowbit_strategy.methods._base.feedback import FeedbackCodec, MomentumCodec, average_
from lowbit_strategy.methods._base.method import CodecPair, ResidualDtype
from lowbit_strategy.methods.loco import LoCoCodec
from lowbit_strategy.options.configuration import configuration


@configuration
class EFSignSGD(Compressor):
    """One bit per element, with full error feedback on both hops.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``p = g + e``
    2. send ``Q = mean|p| * sign(p)``
    3. ``e' = p - Q``

    The fused LoCo kernel with 1-bit codes and beta 0 does it in one pass.

    Args:
        block_size: Elements that share a magnitude, a power of two; a layer in the publication. Smaller: less error,
            16 / block_size more bits.
        residual: ``float32`` costs 4 bytes per parameter on every rank and keeps the error exactly; ``int8`` 1.
        high_precision_bits: Per code of embeddings and output heads.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
        arXiv 1901.09847, algorithm 1; on both hops: Zheng, Huang, Kwok, 2019, arXiv 1905.10936.
    """

    name: ClassVar[str] = "efsignsgd"

    block_size: int = 256
    residual: ResidualDtype = "float32"
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)

    def conserving(self) -> EFSignSGD:
        return replace(self, residual="float32")

    def _codecs(self, fmt: BlockFormat) -> CodecPair:
        stateful = LoCoCodec(
            fmt=fmt,
            beta=0.0,
            reset_steps=None,
            residual=self.residual,
            rounding="nearest",
            residual_rounding="stochastic",
        )
        return CodecPair(stateful)

    def method(self, spec: TensorSpec) -> CodecPair:
        signs = BlockFormat(bits=1, block_size=self.block_size, scale_rule="mean_abs", codebook=(-1.0, 1.0))
        return self._codecs(signs)

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._codecs(uniform(self.high_precision_bits, self.block_size))


_MEAN_NBYTES = 4  # both means, bfloat16


@dataclass(frozen=True, slots=True)
class TwoMeansCodec(BlockwiseCodec):
    """`OneBitSGD`'s quantizer: the 1-bit code of least squared error that splits a block at 0."""

    block_size: int = 512

    @property
    def label(self) -> str:
        return f"1-bit, two means per block of {self.block_size}"

    @property
    def block_nbytes(self) -> int:
        return self.block_size // 8 + _MEAN_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        positive_KB = h_KB >= 0
        means = []
        for part_KB in (valid_KB & ~positive_KB, valid_KB & positive_KB):
            count_K = part_KB.sum(-1).clamp(min=1)
            means.append(tree_sum(torch.where(part_KB, h_KB, 0.0) / count_K[:, None]))
        means_K2 = torch.stack(means, 1)
        means_K2 = torch.where(finite_K[:, None], means_K2, torch.nan).to(torch.bfloat16)
        return torch.cat([pack_bits(positive_KB), means_K2.view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        means_K2 = trailer(payload_KC, _MEAN_NBYTES, torch.bfloat16).float()
        positive_KB = unpack_bits(payload_KC[:, :-_MEAN_NBYTES])
        return torch.where(positive_KB, means_K2[:, 1:], means_K2[:, :1])


@configuration
class OneBitSGD(EFSignSGD):
    """One bit per element, which decodes to the mean of the elements that share it. Error feedback on both hops.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``h = g + e``
    2. send the bits ``h >= 0``, eight to a byte, and the means of the negative and the other elements
    3. ``e' = h - Q``

    Args:
        block_size: Elements that share two means (bfloat16), a power of two; a column in the publication.

    References:
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
        Speech DNNs", Interspeech 2014, section 3.
    """

    name: ClassVar[str] = "onebitsgd"

    block_size: int = 512
    residual: ResidualDtype = "float32"

    def method(self, spec: TensorSpec) -> CodecPair:
        return self._with_feedback(TwoMeansCodec(self.block_size))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._with_feedback(BlockCodec(uniform(self.high_precision_bits, self.block_size)))

    def _with_feedback(self, codec: Codec) -> CodecPair:
        stateful = FeedbackCodec(codec=codec, residual=self.residual)
        return CodecPair(stateful)


VoteScale = Literal["mean_abs", "one"]


@dataclass(frozen=True, slots=True)
class SignCodec(BlockwiseCodec):
    """Signs, eight to a byte, and the block's mean magnitude; the sign of a zero is drawn at random."""

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
        return torch.cat([pack_bits(h_KB >= 0), mean_K[:, None].view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        mean_K1 = trailer(payload_KC, SCALE_NBYTES, torch.bfloat16).float()
        return torch.where(unpack_bits(payload_KC[:, :-SCALE_NBYTES]), mean_K1, -mean_K1)


@dataclass(frozen=True, slots=True)
class VoteCodec(StatefulCodec):
    """Signs to the owner, which takes the sign of their sum; blocks of zeros abstain.

    If a rank's block is not finite, neither is the result.
    """

    codec: SignCodec
    scale: VoteScale
    momentum: float = 0.0

    @property
    def label(self) -> str:
        what = f"signs of momentum {self.momentum:g}" if self.momentum else "signs"
        return f"{what}, majority vote, blocks of {self.block_size}"

    def arenas(self) -> dict[str, Arena]:
        return {"momentum": Arena(torch.float32)} if self.momentum else {}

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        if self.momentum and segments.rows:
            packed = pack_segments(segments, self.block_size)
            x = average_(packed, state, "momentum", packed.collect(x), self.momentum)
            segments = packed.segments
        self.codec.encode_segments_(x, wire, segments, seed=step.seed, flag=flag)

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
class SignSGD(Compressor):
    """The sign of the sum of signs.

    1. every rank sends the signs of its gradient, eight to a byte, with the mean magnitude of each block; with
       `momentum` the signs of its average ``m = momentum * m + (1 - momentum) * g`` (Signum)
    2. the owner takes ``sign(sum of signs)``; a tie is 0. A zero votes at random; a block of zeros abstains
    3. the result has the mean over ranks of the mean magnitudes (``scale="mean_abs"``), which keeps learning rates
       and the proportion to exempt parameters, or magnitude 1 as published
    4. DDP only: the owner sends the vote back in three values, five to a byte (1.6 bits), with a scale per block

    Biased, and stateless: if ranks disagree mostly by noise it does not converge to the optimum. `EFSignSGD` and LoCo
    at 1 bit do better for the same bytes. Exempt and high-precision parameters have the same momentum, uncompressed and
    at `high_precision_bits`.

    Args:
        block_size: Elements that share a magnitude, a power of two.
        scale: ``mean_abs`` or ``one``.
        momentum: Weight of the old average, in [0, 1); 0 votes with gradients; 0.9 as published. Costs 4 bytes per
            parameter on every rank. The optimizer should have no momentum then (``SGD(momentum=0)``).
        high_precision_bits: Per code of embeddings and output heads, rounded without bias.

    References:
        Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", 2019,
        arXiv 1810.05291, algorithm 1, whose votes are signs of local momenta.
    """

    name: ClassVar[str] = "signsgd"
    approaches_mean: ClassVar[bool] = False

    block_size: int = 256
    scale: VoteScale = "mean_abs"
    momentum: float = 0.0
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")

    def exempted(self, spec: TensorSpec) -> Assignment | None:
        assignment = Compressor.exempted(self, spec)
        return None if assignment is None else assignment._replace(method=self._averaged(DenseCodec()))

    def method(self, spec: TensorSpec) -> CodecPair:
        vote = VoteCodec(SignCodec(self.block_size), self.scale, self.momentum)
        return CodecPair(vote, BlockCodec(ternary(self.block_size)))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._averaged(BlockCodec(uniform(self.high_precision_bits, self.block_size), "stochastic"))

    def _averaged(self, codec: Codec) -> CodecPair:
        if not self.momentum:
            return CodecPair(codec)
        return CodecPair(MomentumCodec(momentum=self.momentum, averaged=True, codec=codec), codec)
