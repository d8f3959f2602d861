"""EF21's codec: both sides keep an estimate, and differences from it travel (Markov compression)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.collectives.stateful_codec import Arena, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._residual_rules.momentum import average_


@dataclass(frozen=True, slots=True)
class MarkovCodec(StatefulCodec):
    """The sender sends ``c = C(v - estimate)``, and both sides add c to what they know.

    1. sender: ``v_r = momentum * v_r + (1 - momentum) * g_r`` (at first ``v_r = g_r``), ``c_r = C(v_r - estimate_r)``,
       ``estimate_r += c_r``
    2. receiver: ``total += sum of c_r``; the result is total

    So ``total`` is always the sum of the senders' estimates, to rounding. Where c is not finite the result is, for this
    step, not finite either, and neither side moves. There is no idle rule: an estimate follows a gradient to zero.

    Args:
        codec: C; may be biased, must shrink: ``|x - C(x)| < |x|``.
        momentum: 0 keeps no average: v is g.
    """

    codec: Codec
    momentum: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.codec.label}, differences (EF21{f', momentum {self.momentum:g}' if self.momentum else ''})"

    def arenas(self) -> dict[str, Arena]:
        arenas = {"estimate": Arena(torch.float32), "total": Arena(torch.float32, extent="receiver")}
        return arenas | {"average": Arena(torch.float32)} if self.momentum else arenas

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.block_size)
        v = packed.collect(x)
        if self.momentum:
            v = average_(packed, state, "average", v, self.momentum)
        estimate = packed.collect_state(state["estimate"])
        self.codec.encode_segments_(v - estimate, wire, packed.segments, seed=step.seed, flag=flag)
        packed.store_state_(state["estimate"], estimate + _finite(self._decode(wire.view(1, -1), packed)))

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        packed = pack_segments(segments, self.block_size)
        total = packed.collect_state(state["total"])
        bad = torch.zeros_like(total, dtype=torch.bool)
        for rank in range(wire_WB.shape[0]):  # one by one: a rank's message that is not finite is left out alone
            sent = self._decode(wire_WB[rank : rank + 1], packed)
            bad |= ~sent.isfinite()
            total += _finite(sent)
        packed.store_state_(state["total"], total)
        packed.spread_(torch.where(bad, torch.nan, total * alpha), out)

    def decode_sent_(self, wire: Tensor, out: Tensor, segments: Segments, state: StateTensors) -> None:
        packed = pack_segments(segments, self.block_size)
        packed.spread_(packed.collect_state(state["estimate"]), out)

    def _decode(self, wire_1B: Tensor, packed: Packed) -> Tensor:
        sent = torch.zeros(packed.numel, dtype=torch.float32, device=wire_1B.device)
        self.codec.decode_sum_segments_(wire_1B, sent, packed.segments, alpha=1.0)
        return sent


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)
