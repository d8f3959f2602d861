"""Error feedback for any codec: what was not sent is added to the next gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.contraction import contracts
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.collectives.comm import Comm, LocalComm, Pending, wait_for_all
from lowbit_strategy.collectives.layout import flat_cut
from lowbit_strategy.collectives.stateful_codec import Arena, StatefulCodec, StateTensors, StepContext
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods._base.method import ResidualDtype, residual_arenas
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View, WrappedReducer
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackCodec(StatefulCodec):
    """A codec with a residual, on every piece of a bucket at once:

    1. ``h = g + e``
    2. send ``Q = C(h)``
    3. ``e' = decay * (beta * e + (1 - beta) * (h - Q))``

    A piece whose gradient is all zero is idle: it sends zeros and keeps its residual. Where h or Q is not finite the
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
        self.codec.encode_segments_(h, wire, packed.segments, seed=step.seed, flag=flag)
        sent = torch.zeros_like(h)
        self.codec.decode_sum_segments_(wire.view(1, -1), sent, packed.segments, alpha=1.0)
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
class FeedbackReducer(WrappedReducer):
    """A reducer that keeps no residual, with one: ``h = g + e``, reduce h, ``e' = decay * (h - sent)``.

    Args:
        inner: Fills ``View.sent``.
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

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
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


def contracting(codec: Codec) -> Codec:
    """The nearest form of `codec`, which feedback can do with.

    Raises:
        ValueError: Its error can be larger than its input: a residual would grow with every step.
    """
    nearest = codec.nearest()
    if not _contracts(nearest):
        raise ValueError(
            f"{codec.label!r} can err by more than its input, so what has not been sent would grow with every step: use"
            " smaller blocks, more bits or another compressor"
        )
    return nearest


def contracting_reducer(reducer: Reducer) -> Reducer:
    """As `contracting`, for a method with communication of its own."""
    nearest = reducer.nearest()
    if not _contracts_alone(nearest):
        raise ValueError(
            f"{reducer.label!r} can err by more than its input, so what has not been sent would grow with every step:"
            " use it without feedback (for random-k: RandomK(scale=False), which has feedback of its own)"
        )
    return nearest


@functools.cache
def _contracts(codec: Codec) -> bool:
    return codec.contracts


@functools.cache
def _contracts_alone(reducer: Reducer) -> bool:
    """Tried on one rank."""
    size = 1024
    spec, comm = TensorSpec("probe", (32, size // 32)), LocalComm()

    def sent(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        view = View(spec, flat_cut(size, 1, 1), x.clone(), torch.zeros_like(x), sent=result)
        state = reducer.init([spec], x.device)
        wait_for_all(reducer.reduce([view], state, comm, StepContext(0, 0, 0)))
        return result

    return contracts(sent, size)


def check_decay(decay: float) -> None:
    """Raises:
    ValueError: Out of range.
    """
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"decay must be in (0, 1], got {decay!r}")
