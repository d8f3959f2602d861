"""A codec turns floats into a fixed number of bytes and back, and knows no ranks.

It is used on one hop of a method: the uplink, to the owner of a share, or the downlink, from the owner. A `Codec` keeps
nothing, so its errors are lost; a `StatefulCodec` keeps state between steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.packed import parts_of
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.segments import Segment, Segments

_SEED = 0x5EED


StateTensors = dict[str, Tensor]  # a method's tensors by name


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step in which a bucket is reduced.

    Args:
        index: Optimizer steps completed.
        seed: 32 bits, private to this rank, different in every step.
        shared_seed: 32 bits, the same on all ranks, different in every step.
    """

    index: int
    seed: int
    shared_seed: int


class Arena(NamedTuple):
    """Describes one state tensor of a codec, which holds all its parameters.

    Args:
        dtype: Dtype of its elements.
        extent: ``sender``: one entry per encoded element; ``receiver``: one per decoded element.
        per_block: One entry per block instead of one per element.
    """

    dtype: torch.dtype
    extent: Literal["sender", "receiver"] = "sender"
    per_block: bool = False


class Codec(ABC):
    """float[n] <-> uint8[wire_nbytes(n)].

    A codec is a frozen dataclass. It implements `encode` and `decode_sum` for one tensor; `encode_` and `decode_sum_`,
    which work on a bucket in place, loop over its segments. A `BucketCodec` codes a whole bucket at once.
    """

    in_one_pass: ClassVar[bool] = False  # with no temporary memory per element; otherwise parts are coded in turn

    @property
    def block_size(self) -> int:
        """Number of elements that are coded together; shares start at multiples of it."""
        return 1

    @property
    def label(self) -> str:
        """A few words for reports."""
        return type(self).__name__.removesuffix("Codec").lower()

    def decoded(self, x_N: Tensor) -> Tensor:
        """What the other ranks decode from one tensor, float32 [N]."""
        return self.decode_sum(self.encode(x_N, seed=0)[None], x_N.numel())

    @property
    def keeps_zeros(self) -> bool:
        """Whether a zero among other values is decoded as zero, tested with such a block. Every codec decodes a block
        of zeros as zeros.
        """
        x = torch.randn(max(self.block_size, 64), generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
        x[1::3] = 0.0
        return not bool(self.decoded(x)[1::3].any())

    @abstractmethod
    def wire_nbytes(self, numel: int) -> int:
        """Number of bytes for `numel` elements: exact, and independent of their values."""

    @abstractmethod
    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        """Encode float32, bfloat16 or float16 [N] as uint8 [wire_nbytes(N)]. `seed`: 32 bits for stochastic codecs."""

    @abstractmethod
    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        """Decode W rows and add them in float32 in row order: float32 [numel]."""

    # -- one hop of a method --------------------------------------------------------------------------------------

    def batches(self, segments: Segments, device: torch.device) -> tuple[Segments, ...]:
        """Split the segments into batches that are encoded or decoded one at a time."""
        return (segments,) if self.in_one_pass else parts_of(segments, device)

    @property
    def residual_gain(self) -> float | None:
        """The conservation law: everything sent plus ``residual / residual_gain`` equals everything that came in.

        1 for plain error feedback, ``1 - beta`` for LoCo, infinity if nothing is ever left over. None: there is no such
        law, and errors are lost.
        """
        return None

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        """Add the residual, if there is one, to a bucket's segments, and write their codes into `wire`.

        Args:
            x: The bucket, 1-D.
            wire: uint8, 1-D: the messages.
            segments: The places of elements in `x` and of their codes in `wire`, and where their state begins.
            state: Arenas that keep unsent values; empty for a codec without state.
            step: Counter and seeds.
            flag: int32 [1], set to 1 if `x` is not finite.
        """
        for row in segments.rows:
            x_N = x[row.x_offset : row.x_offset + row.numel]
            encoded = self.encode(x_N, seed=step.seed ^ row.salt)
            wire[row.wire_offset : row.wire_offset + encoded.numel()] = encoded
            flag |= (~x_N.isfinite().all()).to(flag.dtype)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        """Decode the W rows segment by segment: ``out = alpha * sum``, added in float32 in row order."""
        for row in segments.rows:
            rows = wire_WB[:, row.wire_offset : row.wire_offset + self.wire_nbytes(row.numel)]
            total = self.decode_sum(rows.contiguous(), row.numel)
            out[row.x_offset : row.x_offset + row.numel] = total.mul_(alpha)

    def decode_sent_(self, wire: Tensor, out: Tensor, segments: Segments, state: StateTensors) -> None:
        """What the other ranks decode from this rank's last message, for observers. `state` is the sender's."""
        self.decode_sum_(wire.view(1, -1), out, segments, state, 1.0)


class BucketCodec(Codec):
    """A codec that codes all segments of a bucket at once. It treats one tensor as a bucket of one segment.

    It implements `encode_` and `decode_sum_`.
    """

    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        wire = torch.zeros(self.wire_nbytes(x_N.numel()), dtype=torch.uint8, device=x_N.device)
        flag = torch.zeros(1, dtype=torch.int32, device=x_N.device)
        segments = Segments([Segment(0, x_N.numel(), 0, 0)])
        self.encode_(x_N.contiguous(), wire, segments, {}, StepContext(0, seed, 0), flag)
        return wire

    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        out = torch.empty(numel, dtype=torch.float32, device=wire_WB.device)
        self.decode_sum_(wire_WB, out, Segments([Segment(0, numel, 0, 0)]), {}, 1.0)
        return out


@dataclass(frozen=True, slots=True)
class DenseCodec(BucketCodec):
    """The identity codec: floats are sent unchanged, or cast to bfloat16, and always summed in float32. It carries
    exempt tensors in the same messages.
    """

    in_one_pass: ClassVar[bool] = True

    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be one of float32, bfloat16, got {self.dtype!r}")

    @property
    def fmt(self) -> DenseFormat:
        return DenseFormat(self.dtype)

    @property
    def label(self) -> str:
        return self.dtype

    @property
    def residual_gain(self) -> float | None:
        return math.inf if self.dtype == "float32" else None

    def wire_nbytes(self, numel: int) -> int:
        return self.fmt.wire_nbytes(numel)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        encode_(x, wire, segments, self.fmt, flag=flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        decode_sum_(wire_WB, out, segments, self.fmt, alpha=alpha)


class StatefulCodec(Codec):
    """A codec with state that it keeps between steps, such as a residual.

    It is a frozen dataclass whose field `codec` makes the bytes. A subclass defines what it encodes (`encode_`) and
    what it keeps (`arenas`). State is passed in as arenas and changed in place: one long tensor for all parameters, so
    that a bucket needs one kernel call. Segments' ``state_offset`` points into the arenas in elements; arenas with one
    entry per block are indexed by ``state_offset / block_size``. Without state it codes one tensor as `codec` does.
    """

    codec: Codec

    @abstractmethod
    def arenas(self) -> dict[str, Arena]:
        """Arenas by name. ``residual``, floats or int8 with a ``residual_scale``, is carried over to another codec."""

    @property
    def block_size(self) -> int:
        return self.codec.block_size

    @property
    def label(self) -> str:
        return self.codec.label

    @property
    def keeps_zeros(self) -> bool:
        return self.codec.keeps_zeros

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(numel)

    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        return self.codec.encode(x_N, seed=seed)

    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        return self.codec.decode_sum(wire_WB, numel)

    @abstractmethod
    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None: ...

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        self.codec.decode_sum_(wire_WB, out, segments, {}, alpha)
