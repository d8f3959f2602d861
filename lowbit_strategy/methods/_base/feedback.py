"""What a codec keeps between steps: a residual (error feedback), a momentum, or an estimate (EF21)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Arena, Codec, DenseCodec, StatefulCodec, StateTensors, StepContext, contracts
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.collectives.comm import Comm, LocalComm, Pending, wait_for_all
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.method import ResidualDtype, residual_arenas
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState

CodecOrReducer = TypeVar("CodecOrReducer", Codec, Reducer)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackCodec(StatefulCodec):
    """A codec with a residual, on every segment of a bucket at once:

    1. ``h = g + e``
    2. send ``Q = C(h)``
    3. ``e' = decay * (beta * e + (1 - beta) * (h - Q))``

    A segment whose gradient is all zero is idle: it sends zeros and keeps its residual. Where h or Q is not finite the
    residual stays as it was.

    Args:
        codec: C.
        beta: 0 is classic feedback; above, LoCo's moving average.
        decay: Below 1 old errors fade; nothing is conserved then.
        residual: ``int8`` has one scale per block and is rounded at random.
    """

    codec: Codec
    beta: float = 0.0
    decay: float = 1.0
    residual: ResidualDtype = "float32"

    @property
    def label(self) -> str:
        return f"{self.codec.label}, error feedback"

    @property
    def residual_gain(self) -> float | None:
        return 1.0 - self.beta if self.decay == 1.0 else None

    def stateless(self) -> Codec:
        return self.codec

    def arenas(self) -> dict[str, Arena]:
        return residual_arenas(self.residual)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.block_size)
        g = packed.collect(x)
        e = self._read(packed, state)
        idle = packed.idle(g)
        h = torch.where(idle, 0.0, g + e)
        self.codec.encode_(h, wire, packed.segments, {}, step, flag)
        sent = torch.zeros_like(h)
        self.codec.decode_sum_(wire.view(1, -1), sent, packed.segments, {}, 1.0)
        updated = (e * self.beta + (h - sent) * (1.0 - self.beta)) * self.decay
        keep = idle | ~updated.isfinite()
        self._write_(packed, state, torch.where(keep, e, updated), keep, step)

    def _read(self, packed: Packed, state: StateTensors) -> Tensor:
        e = packed.collect_state(state["residual"])
        if self.residual == "float32":
            return e
        scale_K = packed.collect_state(state["residual_scale"], self.block_size).float()
        return (e.view(-1, self.block_size).float() * scale_K[:, None]).view(-1)

    def _write_(self, packed: Packed, state: StateTensors, e: Tensor, keep: Tensor, step: StepContext) -> None:
        if self.residual == "float32":
            packed.store_state_(state["residual"], e)
            return
        noise_KB = packed.noise(step.seed, RESIDUAL_STREAM, e.device)
        codes_KB, scale_K = blocks.quantize_residual(e.view(-1, self.block_size), noise_KB)
        keep_K = keep.view(-1, self.block_size).all(-1)  # exactly as it was, not rounded once more
        old_KB = packed.collect_state(state["residual"]).view_as(codes_KB)
        old_scale_K = packed.collect_state(state["residual_scale"], self.block_size)
        codes = torch.where(keep_K[:, None], old_KB, codes_KB).view(-1)
        packed.store_state_(state["residual"], codes)
        new_scale_K = torch.where(keep_K, old_scale_K, blocks.to_bfloat16(scale_K))
        packed.store_state_(state["residual_scale"], new_scale_K, self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackReducer(Reducer):
    """A reducer that keeps no residual, with one: ``h = g + e``, reduce h, ``e' = decay * (h - sent)``.

    Args:
        inner: Fills ``ParamView.sent``.
        decay: See `FeedbackCodec`.
    """

    inner: Reducer
    decay: float = 1.0

    @property
    def label(self) -> str:
        return f"{self.inner.label}, error feedback"

    @property
    def residual_gain(self) -> float | None:
        return 1.0 if self.decay == 1.0 else None

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        state = self.inner.init(specs, device)
        for spec in specs:
            residual = torch.zeros(spec.numel, dtype=torch.float32, device=device)
            state.setdefault(spec.name, {})["residual"] = residual
        return state

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        inner_views, idles = [], []
        for view in views:
            g = view.flat().float()
            idle = (g == 0).all()  # now: the result may be written over the gradient
            h = torch.where(idle, 0.0, g + state[view.spec.name]["residual"])
            inner_views.append(view._replace(x=view.rows(h) if view.spec.sharded else h, sent=torch.empty_like(h)))
            idles.append(idle)
        yield from self.inner.reduce(inner_views, state, comm, step)
        for view, inner, idle in zip(views, inner_views, idles, strict=True):
            residual, sent = state[view.spec.name]["residual"], inner.sent
            assert sent is not None
            updated = (inner.flat() - sent) * self.decay
            residual.copy_(torch.where(idle | ~updated.isfinite(), residual, updated))
            if view.sent is not None:
                view.sent.copy_(sent)

    @property
    def whole_model(self) -> bool:  # type: ignore[override]
        return self.inner.whole_model

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]
        return self.inner.fixed_size

    @property
    def temporary_nbytes(self) -> float:
        return self.inner.temporary_nbytes

    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        return self.inner.keeps_zero_rows(spec)

    def serves(self, spec: TensorSpec) -> bool:
        return self.inner.serves(spec)

    def rescale_(self, state: ReducerState, factor: float | Tensor) -> None:
        self.inner.rescale_(state, factor)  # a residual of the wrapper's own too: by default what bears that name is

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return self.inner.num_messages(specs, world_size)

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return self.inner.wire_nbytes(spec, world_size)


def contracting(part: CodecOrReducer) -> CodecOrReducer:
    """The nearest form of a codec or a reducer, which feedback can do with.

    Raises:
        ValueError: Its error can be larger than its input: a residual would grow with every step.
    """
    nearest = part.nearest()
    if not _contracts(nearest):
        advice = "use smaller blocks, more bits or another compressor"
        if isinstance(part, Reducer):
            advice = "use it without feedback (for random-k: RandomK(scale=False), which has feedback of its own)"
        raise ValueError(
            f"{part.label!r} can err by more than its input, so what has not been sent would grow with every step:"
            f" {advice}"
        )
    return nearest


@functools.cache
def _contracts(part: Codec | Reducer) -> bool:
    """A reducer is tried on one rank."""
    if isinstance(part, Codec):
        return part.contracts
    size = 1024
    spec, comm = TensorSpec("probe", (32, size // 32)), LocalComm()

    def sent(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        view = ParamView(spec, 1, size, x=x.clone(), out=torch.zeros_like(x), sent=result)
        state = part.init([spec], x.device)
        wait_for_all(part.reduce([view], state, comm, StepContext(0, 0, 0)))
        return result

    return contracts(sent, size)


def check_decay(decay: float) -> None:
    """Raises:
    ValueError: Out of range.
    """
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"decay must be in (0, 1], got {decay!r}")


def average_(packed: Packed, state: StateTensors, key: str, gradient: Tensor, momentum: float) -> Tensor:
    """The moving average ``momentum * old + (1 - momentum) * gradient``, which is also stored under `key`.

    The first gradient of a segment is its first average. A gradient that is not finite is passed on, and what is stored
    stays as it was.
    """
    old = packed.collect_state(state[key])
    average = torch.where(packed.idle(old), gradient, old * momentum + gradient * (1.0 - momentum))
    packed.store_state_(state[key], torch.where(average.isfinite(), average, old))
    return average


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumCodec(StatefulCodec):
    """A codec of the momentum of what comes in, for parameters whose optimizer leaves momentum to the compressor.

    Args:
        momentum: Lies in [0, 1).
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
