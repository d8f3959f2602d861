"""Lanes: a codec and a residual rule. The lanes of a bucket share its two exchanges."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.exchange import State, StepContext
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.segments import Segments


class Arena(NamedTuple):
    """One state tensor of a lane, for all its parameters together.

    Args:
        dtype: Of the elements.
        extent: ``sender``: as many elements as are encoded; ``receiver``: as many as are decoded.
        per_block: One entry a block instead of one an element.
    """

    dtype: torch.dtype
    extent: Literal["sender", "receiver"] = "sender"
    per_block: bool = False


class StatefulCodec(ABC):
    """A codec with a residual rule, for one hop. A frozen dataclass; its state is arenas passed in, changed in place.

    Segments' ``state_offset`` point into the arenas in elements; per-block arenas are indexed by
    ``state_offset / block_size``.
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
    def residual_gain(self) -> float | None:
        """The law of conservation that the lane keeps: all that was sent plus ``residual / gain`` is all that came in.

        1 for plain error feedback, ``1 - beta`` for LoCo, infinity where nothing is ever left unsaid; None: no law,
        what is not said is lost.
        """
        return None

    @abstractmethod
    def arenas(self) -> dict[str, Arena]:
        """State by name. ``residual`` (with ``residual_scale`` if it is int8) is carried over when lanes change."""

    @abstractmethod
    def wire_nbytes(self, numel: int) -> int: ...

    @abstractmethod
    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: State, step: StepContext, flag: Tensor
    ) -> None:
        """Write what is to be said of `x` into `wire`, and keep what was not said in `state`."""

    @abstractmethod
    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: State, alpha: float) -> None:
        """``out = alpha * sum`` of what the W rows say."""

    def decode_sent_(self, wire: Tensor, out: Tensor, segments: Segments, state: State) -> None:
        """What the others make of this rank's last message, `state` being the sender's. For monitors."""
        self.decode_sum_(wire.view(1, -1), out, segments, state, 1.0)


@dataclass(frozen=True, slots=True)
class PlainCodec(StatefulCodec):
    """A codec without memory: what it does not say is lost (nothing, for an identity codec)."""

    codec: Codec

    @property
    def label(self) -> str:
        return self.codec.label

    @property
    def residual_gain(self) -> float | None:
        return math.inf if self.codec == DenseCodec("float32") else None

    @property
    def block_size(self) -> int:
        return self.codec.block_size

    def arenas(self) -> dict[str, Arena]:
        return {}

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(numel)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: State, step: StepContext, flag: Tensor
    ) -> None:
        self.codec.encode_segments_(x, wire, segments, seed=step.seed, flag=flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: State, alpha: float) -> None:
        self.codec.decode_sum_segments_(wire_WB, out, segments, alpha=alpha)


def read_residual(state: State, block_size: int) -> Tensor | None:
    """float32 values of a residual of any kind, in arena order; None where the lane keeps none."""
    residual = state.get("residual")
    if residual is None:
        return None
    scale = state.get("residual_scale")
    if scale is None:
        return residual.float()
    return (residual.view(-1, block_size).float() * scale.float()[:, None]).view(-1)


def write_residual_(state: State, block_size: int, values: Tensor) -> None:
    """Store float32 `values`, in arena order and padded to whole blocks, in a residual of any kind."""
    if "residual_scale" not in state:
        state["residual"].copy_(values)
        return
    grid = uniform(8, block_size)
    values_KB = values.view(-1, block_size)
    scale_K = blocks.residual_scale(values_KB, grid)
    codes = blocks.quantize(values_KB, scale_K, grid).to(torch.int16) - grid.qmax
    state["residual"].copy_(codes.view(-1))
    state["residual_scale"].copy_(scale_K)
