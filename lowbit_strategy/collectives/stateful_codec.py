"""A codec with a rule for its residual: what the shared exchange of a bucket encodes and decodes with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.packed import parts_of
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.segments import Segments

StateTensors = dict[str, Tensor]  # of a method: tensors by name


class Arena(NamedTuple):
    """One state tensor of a stateful codec, for all its parameters together.

    Args:
        dtype: What its elements are.
        extent: ``sender``: as many elements as are encoded; ``receiver``: as many as are decoded.
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

    A frozen dataclass. Its state is arenas that are passed in and changed in place: one long tensor for all parameters,
    so that one kernel call serves a bucket. Segments' ``state_offset`` point into the arenas in elements; arenas with
    one entry per block are indexed by ``state_offset / block_size``.
    """

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Chunks start on multiples of it, so that blocks are the same for every world size."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for reports: method, bits, block size."""

    @property
    def in_one_pass(self) -> bool:
        """A kernel codes a bucket without temporary memory per element; otherwise parts of it take turns."""
        return False

    def turns(self, segments: Segments, device: torch.device) -> tuple[Segments, ...]:
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
        return self.stateless().keeps_zeros

    def stateless(self) -> Codec:
        """The codec alone, without its residual: for wrappers, which have a rule of their own.

        Raises:
            ValueError: It has no codec that could serve alone.
        """
        raise ValueError(f"{self.label!r} has no codec of its own: wrap a quantiser such as QSGD, LoCo or OneBitSGD")

    @abstractmethod
    def arenas(self) -> dict[str, Arena]:
        """State by name. ``residual`` is carried over when the codec changes: floats, or int8
        with a ``residual_scale``.
        """

    @abstractmethod
    def wire_nbytes(self, numel: int) -> int:
        """Bytes of a message of `numel` elements."""

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

    @abstractmethod
    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        """``out = alpha * sum`` of what the W rows decode to, added in float32 in row order."""

    def decode_sent_(self, wire: Tensor, out: Tensor, segments: Segments, state: StateTensors) -> None:
        """What the others decode of this rank's last message, `state` being the sender's. For observers."""
        self.decode_sum_(wire.view(1, -1), out, segments, state, 1.0)
