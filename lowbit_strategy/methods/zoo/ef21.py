"""EF21: ranks send the change of an estimate that both sides know."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Arena, Codec, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.momentum import average_
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.zoo.contraction import contracting, without_residual
from lowbit_strategy.methods.zoo.wrapper import Wrapper
from lowbit_strategy.options.configuration import configuration


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
        self.codec.encode_(v - estimate, wire, packed.segments, {}, step, flag)
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
        self.codec.decode_sum_(wire_1B, sent, packed.segments, {}, 1.0)
        return sent


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)


@configuration
class EF21(Wrapper):
    """Markov compression with the codec of any quantizer, on both hops (CD-Adam's rule).

    1. every rank: ``v_r = momentum * v_r + (1 - momentum) * g_r``; ``c_r = C(v_r - ghat_r)``, ``ghat_r += c_r``; c goes
       to the owners
    2. owner: ``G += mean of c_r``, so G is the mean of all ghat
    3. DDP only: the owner sends ``C(G - gt)`` back, and all ranks add it to gt, the result

    When v changes slowly, differences and errors become small, without a residual's lag. Without momentum v is the
    gradient, and with small batches its noise keeps the differences large. Stochastic rounding is replaced by rounding
    to nearest: C may be biased but must contract. With the scaled sign of `EFSignSGD` as C, and AMSGrad, this is
    CD-Adam.

    Memory under DDP: 8 bytes per parameter on every rank (12 with momentum), and 8 more per owned parameter.

    Args:
        compressor: Gives the codec C; its own feedback is removed. At one bit plain feedback on the same code was
            measured to be better, at 4 bits as good.
        momentum: Weight of the old average in v, in [0, 1); 0: no average. Larger: less noise, more delay. The
            optimizer should have no momentum then.

    Raises:
        ValueError: A field is out of range; the compressor is not a quantizer, or its code does not contract.

    References:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
        Feedback", 2021, arXiv 2106.05203, algorithm 2; with momentum: Fatkhullin, Tyurin, Richtarik, "Momentum Provably
        Improves Error Feedback!", 2023, arXiv 2305.15155; Wang, Lin, Chen, "Communication-Compressed Adaptive Gradient
        Method for Distributed Nonconvex Optimization", 2021, arXiv 2111.00705, algorithm 1 (from the definitions).
    """

    name: ClassVar[str] = "ef21"

    compressor: Compressor = field(default_factory=LoCo)
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        Wrapper.__post_init__(self)

    def wrap(self, method: Method) -> Method:
        wrapped = Wrapper.wrap(self, method)
        if isinstance(wrapped, CodecPair) and isinstance(wrapped.uplink, MarkovCodec):  # gradients, not their mean
            return replace(wrapped, uplink=replace(wrapped.uplink, momentum=self.momentum))
        return wrapped

    def wrap_codec(self, codec: Codec) -> Codec:
        return MarkovCodec(contracting(without_residual(codec)))

    def wrap_reducer(self, reducer: Reducer) -> Reducer:
        raise ValueError(f"EF21 needs a quantizer (LoCo, QSGD, EFSignSGD, OneBitSGD ...), not {reducer.label!r}")
