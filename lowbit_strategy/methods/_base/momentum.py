"""A codec that sends the momentum of gradients, and moving averages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Arena, Codec, DenseCodec, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.kernels.segments import Segments


def average_(packed: Packed, state: StateTensors, key: str, gradient: Tensor, momentum: float) -> Tensor:
    """Return the moving average ``momentum * old + (1 - momentum) * gradient``, and store it under `key`.

    A segment's first gradient is its first average. A gradient that is not finite is returned unchanged, and so is the
    stored average.
    """
    old = packed.collect_state(state[key])
    average = torch.where(packed.idle(old), gradient, old * momentum + gradient * (1.0 - momentum))
    packed.store_state_(state[key], torch.where(average.isfinite(), average, old))
    return average


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumCodec(StatefulCodec):
    """A codec that sends momentum, for parameters whose optimizer leaves momentum to the compressor.

    Args:
        momentum: Weight of the old momentum, in [0, 1).
        nesterov: Sum of gradients with Nesterov's rule.
        averaged: A moving average (`average_`) instead of a sum; `nesterov` is not used then.
        codec: Encodes the momentum; floats by default.
    """

    momentum: float
    nesterov: bool = False
    averaged: bool = False
    codec: Codec = field(default_factory=DenseCodec)

    @property
    def label(self) -> str:
        return f"{self.codec.label} with momentum {self.momentum:g}"

    def arenas(self) -> dict[str, Arena]:
        return {"momentum": Arena(torch.float32)}

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.block_size)
        gradient = packed.collect(x)
        if self.averaged:
            added = average_(packed, state, "momentum", gradient, self.momentum)
        else:
            old = packed.collect_state(state["momentum"])
            updated = (old + gradient) * self.momentum if self.nesterov else old * self.momentum + gradient
            added = updated + gradient if self.nesterov else updated
            packed.store_state_(state["momentum"], torch.where(updated.isfinite(), updated, old))
        self.codec.encode_(added, wire, packed.segments, {}, step, flag)
