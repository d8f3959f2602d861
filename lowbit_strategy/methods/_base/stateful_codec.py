"""The stateful codec without state: a codec whose error is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.stateful_codec import Arena, StatefulCodec, StateTensors
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class PlainCodec(StatefulCodec):
    """A codec without memory: what it does not send is lost (nothing, for an identity codec)."""

    codec: Codec

    @property
    def label(self) -> str:
        return self.codec.label

    @property
    def in_one_pass(self) -> bool:
        return self.codec.in_one_pass

    @property
    def residual_gain(self) -> float | None:
        return math.inf if self.codec == DenseCodec("float32") else None

    @property
    def block_size(self) -> int:
        return self.codec.block_size

    def stateless(self) -> Codec:
        return self.codec

    def arenas(self) -> dict[str, Arena]:
        return {}

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(numel)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        self.codec.encode_segments_(x, wire, segments, seed=step.seed, flag=flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        self.codec.decode_sum_segments_(wire_WB, out, segments, alpha=alpha)
