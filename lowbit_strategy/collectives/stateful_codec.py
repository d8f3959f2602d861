"""A codec with what it keeps between steps: what the shared exchange of a bucket encodes and decodes with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.codecs.packed import parts_of
from lowbit_strategy.kernels.segments import Segments

StateTensors = dict[str, Tensor]  # of a method: tensors by name


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step that a bucket is reduced in.

    Args:
        index: Optimizer steps completed.
        seed: 32 bits, private to this rank, new in every step.
        shared_seed: 32 bits, the same on all ranks, new in every step.
    """

    index: int
    seed: int
    shared_seed: int


class Arena(NamedTuple):
    """One state tensor of a stateful codec, for all its parameters together.

    Args:
        dtype: What its elements are.
        extent: ``sender``: one entry per encoded element; ``receiver``: per decoded element.
        per_block: One entry per block instead of one per element.
    """

    dtype: torch.dtype
    extent: Literal["sender", "receiver"] = "sender"
    per_block: bool = False

    def unit(self, block_size: int) -> int:
        """Elements per entry."""
        return block_size if self.per_block else 1


class StatefulCodec(ABC):
    """A codec with a residual rule, for one hop: uplink (to the owner of a chunk) or downlink (from the owner).

    A frozen dataclass whose field `codec` makes the bytes; a subclass says what it encodes and what it keeps. State is
    arenas that are passed in and changed in place: one long tensor for all parameters, so that one kernel call serves a
    bucket. Segments' ``state_offset`` point into the arenas in elements; arenas with
    one entry per block are indexed by ``state_offset / block_size``.
    """

    codec: Codec

    @property
    def block_size(self) -> int:
        """Chunks start on multiples of it, so that blocks are the same for every world size."""
        return self.codec.block_size

    @property
    def label(self) -> str:
        """A few words for reports: method, bits, block size."""
        return self.codec.label

    @property
    def in_one_pass(self) -> bool:
        """A kernel codes a bucket without temporary memory per element; otherwise it is coded in chunks."""
        return False

    def chunks(self, segments: Segments, device: torch.device) -> tuple[Segments, ...]:
        """What is encoded or decoded at a time."""
        return (segments,) if self.in_one_pass else parts_of(segments, device)

    @property
    def residual_gain(self) -> float | None:
        """The conservation law: everything sent plus ``residual / residual_gain`` is everything that came in.

        1 for plain error feedback, ``1 - beta`` for LoCo, infinity where nothing is ever left over. None: no such law,
        what is not sent is lost.
        """
        return None

    @property
    def keeps_zeros(self) -> bool:
        """The same as `Codec.keeps_zeros`."""
        return self.codec.keeps_zeros

    def stateless(self) -> Codec:
        """The codec alone, without its residual: for wrappers, which have a rule of their own.

        Raises:
            ValueError: It has no codec that could serve alone.
        """
        raise ValueError(f"{self.label!r} has no codec of its own: wrap a quantizer such as QSGD, LoCo or OneBitSGD")

    def arenas(self) -> dict[str, Arena]:
        """State by name. ``residual`` is carried over when the codec changes: floats, or int8
        with a ``residual_scale``.
        """
        return {}

    def wire_nbytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements."""
        return self.codec.wire_nbytes(numel)

    @abstractmethod
    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        """Write the codes of `x` plus the residual into `wire`, and keep what was not sent in `state`.

        Args:
            x: The bucket, 1-D.
            wire: uint8, 1-D: the messages.
            segments: Which elements of `x` go where in `wire`, and where their state begins.
            state: Arenas.
            step: Counter and seeds.
            flag: int32 [1], set to 1 where `x` is not finite.
        """

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        """``out = alpha * sum`` of what the W rows decode to, added in float32 in row order."""
        self.codec.decode_sum_segments_(wire_WB, out, segments, alpha=alpha)

    def decode_sent_(self, wire: Tensor, out: Tensor, segments: Segments, state: StateTensors) -> None:
        """What the others decode of this rank's last message, `state` being the sender's. For observers."""
        self.decode_sum_(wire.view(1, -1), out, segments, state, 1.0)


@dataclass(frozen=True, slots=True)
class PlainCodec(StatefulCodec):
    """A codec without memory: what it does not send is lost (nothing, for an identity codec)."""

    codec: Codec

    @property
    def in_one_pass(self) -> bool:
        return self.codec.in_one_pass

    @property
    def residual_gain(self) -> float | None:
        return math.inf if self.codec == DenseCodec("float32") else None

    def stateless(self) -> Codec:
        return self.codec

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        self.codec.encode_segments_(x, wire, segments, seed=step.seed, flag=flag)
