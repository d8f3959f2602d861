"""Stateful codecs around one codec, and the one without state, whose error is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.stateful_codec import Arena, StatefulCodec, StateTensors
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.segments import Segments


class CodecWithRule(StatefulCodec):
    """What travels is what `codec` makes of it; a subclass, a frozen dataclass, says what is encoded."""

    codec: Codec

    @property
    def label(self) -> str:
        return self.codec.label

    @property
    def block_size(self) -> int:
        return self.codec.block_size

    @property
    def keeps_zeros(self) -> bool:
        return self.codec.keeps_zeros

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(numel)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        self.codec.decode_sum_segments_(wire_WB, out, segments, alpha=alpha)


@dataclass(frozen=True, slots=True)
class PlainCodec(CodecWithRule):
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

    def arenas(self) -> dict[str, Arena]:
        return {}

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        self.codec.encode_segments_(x, wire, segments, seed=step.seed, flag=flag)
