"""Momentum before communication: where the optimizer leaves it to the compressor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.collectives.stateful_codec import Arena, State, StatefulCodec
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.segments import Segments


def add_momentum(momentum: Tensor, gradient: Tensor, factor: float, *, nesterov: bool) -> tuple[Tensor, Tensor]:
    """The new momentum, and what is added to the velocity."""
    if nesterov:
        updated = (momentum + gradient) * factor
        return updated, updated + gradient
    updated = momentum * factor + gradient
    return updated, updated


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumCodec(StatefulCodec):
    """Floats with momentum: for parameters that stay dense while the optimizer leaves momentum to DGC."""

    momentum: float
    nesterov: bool

    @property
    def label(self) -> str:
        return f"float32 with momentum {self.momentum:g}"

    @property
    def block_size(self) -> int:
        return 1

    def arenas(self) -> dict[str, Arena]:
        return {"momentum": Arena(torch.float32)}

    def wire_nbytes(self, numel: int) -> int:
        return DenseCodec().wire_nbytes(numel)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: State, step: StepContext, flag: Tensor
    ) -> None:
        if not segments.rows:
            return
        packed = pack_segments(segments, 1)
        old = packed.collect_state(state["momentum"])
        updated, added = add_momentum(old, packed.collect(x), self.momentum, nesterov=self.nesterov)
        packed.store_state_(state["momentum"], torch.where(updated.isfinite(), updated, old))
        DenseCodec().encode_segments_(added, wire, packed.segments, seed=step.seed, flag=flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: State, alpha: float) -> None:
        DenseCodec().decode_sum_segments_(wire_WB, out, segments, alpha=alpha)
