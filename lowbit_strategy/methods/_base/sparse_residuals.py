"""Error feedback of sparse methods, in float32.

Every step, on every rank, for each parameter:

1. ``h = g + e``, accumulated in the residual itself
2. the method chooses positions of ``h``
3. the values there are sent and taken out of the residual: ``e' = h - sent``
4. the mean of what the ranks sent is written, and zeros elsewhere

A gradient of zeros is idle: it sends nothing and keeps its residual. A gradient with inf or NaN sends NaN, so that all
ranks see it, and leaves its residual unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors
from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.peaks import peaks
from lowbit_strategy.kernels.select import OverflowedSum, Sum
from lowbit_strategy.methods._base.reducer import ReducerState


class Condition(Enum):
    """The state of one parameter's gradient on this rank in this step."""

    LIVE = "live"
    IDLE = "idle"
    NONFINITE = "nonfinite"


def conditions(tensors: Sequence[Tensor]) -> list[Condition]:
    """The condition of each tensor, float [N]."""
    return [
        (Condition.LIVE if peak else Condition.IDLE) if math.isfinite(peak) else Condition.NONFINITE
        for peak in peaks(tensors)
    ]


def filler(count: int, condition: Condition, device: torch.device) -> Chosen:
    """Entries to send if nothing is chosen: `count` positions with NaN to tell all ranks, or zeros as padding."""
    value = math.nan if condition is Condition.NONFINITE else 0.0
    return Chosen(torch.arange(count, device=device), torch.full((count,), value, dtype=torch.float32, device=device))


def pending_sums(views: Sequence[ParamView], state: ReducerState) -> tuple[list[Condition], list[Sum]]:
    """The condition of each gradient, and ``h = g + e``, which C kernels form later and others form in the residual
    now.

    A GPU would have to synchronize to see an overflow while choosing.
    """
    found = conditions([view.x for view in views])
    pending = is_native(views[0].x.device)
    if not pending:
        add_at_once_(views, state, found, _add_, lambda tensors, gradient: undo_(tensors["residual"], gradient))
    return found, [
        Sum(state[view.spec.name]["residual"], view.flat() if pending and condition is Condition.LIVE else None)
        for view, condition in zip(views, found, strict=True)
    ]


def add_at_once_(
    views: Sequence[ParamView],
    state: ReducerState,
    found: list[Condition],
    add_: Callable[[list[StateTensors], list[Tensor]], object],
    take_back_: Callable[[StateTensors, Tensor], object],
) -> None:
    """Add live gradients to the state; undo overflows and mark them as not finite."""
    live = [i for i, condition in enumerate(found) if condition is Condition.LIVE]
    if not live:
        return
    tensors, gradients = [state[views[i].spec.name] for i in live], [views[i].flat() for i in live]
    add_(tensors, gradients)
    for at, condition in enumerate(conditions([each["residual"] for each in tensors])):
        if condition is Condition.NONFINITE:
            take_back_(tensors[at], gradients[at])
            found[live[at]] = condition


def _add_(tensors: list[StateTensors], gradients: list[Tensor]) -> None:
    torch._foreach_add_([each["residual"] for each in tensors], gradients)


def form_(views: Sequence[ParamView], state: ReducerState, found: list[Condition], totals: Sequence[Sum]) -> None:
    """Form pending sums; undo overflows and mark them as not finite."""
    for i, (view, total) in enumerate(zip(views, totals, strict=True)):
        try:
            total.formed()
        except OverflowedSum:
            undo_(state[view.spec.name]["residual"], view.flat())
            found[i] = Condition.NONFINITE


def accumulate_(views: Sequence[ParamView], state: ReducerState) -> list[Condition]:
    """``h = g + e`` in the residuals of live gradients. Returns the condition of each gradient.

    A sum that overflows counts as not finite, and is dropped from the residual.
    """
    found, totals = pending_sums(views, state)
    form_(views, state, found, totals)
    return found


def undo_(residual: Tensor, gradient: Tensor) -> None:
    """Undo an overflow, up to rounding; values that are not finite are dropped."""
    residual.sub_(gradient).nan_to_num_(0.0, 0.0, 0.0)


def trace(view: ParamView, residual: Tensor | None, condition: Condition, chosen: Chosen, sent: Tensor) -> None:
    """Pass a parameter's sent entries to its tracer, before they are taken out of the residual."""
    if view.tracer is None:
        return
    h = view.flat().float() if residual is None else residual
    if residual is not None and condition is not Condition.LIVE:  # not accumulated
        h = h + view.flat()
    view.trace(h, torch.zeros_like(h).index_copy_(0, chosen.indices, sent))
