"""ErrorFeedback: adds a residual to a compressor that has none."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, DenseCodec, StatefulCodec, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.residuals import ResidualDtype
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.zoo.contraction import contracting
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec
from lowbit_strategy.methods.zoo.wrapper import Wrapper
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackReducer(Reducer):
    """Adds a residual to a reducer that has none: ``h = g + e``, reduce h, ``e' = decay * (h - sent)``.

    Args:
        inner: A reducer that calls ``ParamView.trace``.
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
        inner_views = []
        for view in views:
            g = view.flat().float()
            idle = (g == 0).all()  # here, because the result may overwrite the gradient
            h = torch.where(idle, 0.0, g + state[view.spec.name]["residual"])
            keep = functools.partial(self._keep, view, state[view.spec.name]["residual"], idle, h)
            inner_views.append(view._replace(x=view.rows(h) if view.spec.sharded else h, tracer=keep))
        yield from self.inner.reduce(inner_views, state, comm, step)

    def _keep(self, view: ParamView, residual: Tensor, idle: Tensor, h: Tensor, _: Tensor, sent: Tensor) -> None:
        """Make the rest of `h` the residual."""
        updated = (h - sent) * self.decay
        residual.copy_(torch.where(idle | ~updated.isfinite(), residual, updated))
        view.trace(h, sent)

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
        self.inner.rescale_(state, factor)  # also the wrapper's residual, by its name

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return self.inner.num_messages(specs, world_size)

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return self.inner.wire_nbytes(spec, world_size)


@configuration
class ErrorFeedback(Wrapper):
    """Adds a residual to a compressor that has none, on both hops.

    1. ``h = g + e``
    2. the wrapped compressor reduces h; the other ranks decode this rank's part as Q
    3. ``e' = decay * (h - Q)``

    Stochastic rounding is replaced by rounding to nearest: feedback removes the bias, and a code whose error can exceed
    its input, as with unbiased codes of few values, would make the residual grow without bound. Codes that do so even
    when rounding to nearest are refused.

    Args:
        compressor: A compressor without feedback.
        decay: Below 1 old errors fade, and nothing is conserved.
        residual: ``float32`` costs 4 bytes per parameter on every rank; ``int8`` costs 1 (quantizers only).

    Raises:
        ValueError: A field is out of range; the compressor has feedback already, or its code does not contract.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
        arXiv 1901.09847.
    """

    name: ClassVar[str] = "errorfeedback"

    compressor: Compressor = field(default_factory=lambda: QSGD(bits=3))
    decay: float = 1.0
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        check_decay(self.decay)
        Wrapper.__post_init__(self)

    def wrap_codec(self, codec: Codec) -> Codec:
        if isinstance(codec, StatefulCodec):
            raise ValueError(f"{codec.label!r} cannot be given error feedback: it has its own, or would not benefit")
        if isinstance(codec, DenseCodec):
            return codec
        return FeedbackCodec(codec=contracting(codec), decay=self.decay, residual=self.residual)

    def wrap_reducer(self, reducer: Reducer) -> Reducer:
        if reducer.residual_gain is not None:
            raise ValueError(f"{reducer.label!r} has its own error feedback: use it without the wrapper")
        if self.residual != "float32":
            raise ValueError(f"{reducer.label!r} keeps its residual in float32: leave residual='float32'")
        return FeedbackReducer(inner=contracting(reducer), decay=self.decay)


def check_decay(decay: float) -> None:
    """Raise a ValueError if `decay` is out of range."""
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"decay must be in (0, 1], got {decay!r}")
