"""Keeps the unsent residuals of replaced methods, and adds them to the next gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors
from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.engine.transaction_listener import TransactionListener
from lowbit_strategy.methods._base.method import MethodStore, unsent_part


@dataclass(slots=True)
class _Leftover:
    """The unsent residual of one parameter's replaced method.

    Args:
        tensors, numbers: State of the replaced method, or of a method with a float32 residual, as `unsent_part` reads
            it.
        factor: The factor by which the loss scale has changed since.
    """

    tensors: StateTensors
    numbers: Mapping[str, Any]
    factor: float = 1.0

    def read(self) -> Tensor:
        """float32 ``[numel]``, a copy."""
        values = unsent_part(self.tensors, self.numbers)
        assert values is not None
        return values if self.factor == 1.0 else values.mul_(self.factor)


class CarryOver(TransactionListener):
    """Leftover residuals by parameter name, in units of the gradient, stored in as few bytes as before.

    Each one is added once, to a gradient that is not all zero. If that gradient is discarded, it is added again later.

    Attributes:
        waiting: Leftovers that have not been added to a gradient yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.waiting: dict[str, _Leftover] = {}
        self._added: dict[str, _Leftover] = {}  # to gradients that may still be discarded

    def get(self, name: str) -> Tensor | None:
        """A copy of the leftover, float32 ``[numel]``; None: nothing is left over."""
        return self.waiting[name].read() if name in self.waiting else None

    def add(self, name: str, values: Tensor, store: MethodStore | None = None) -> None:
        """Add `values`, float32 ``[numel]``, to the next gradient of `name`. `store`: a store whose state holds the
        same values.
        """
        if not values.any():
            return
        tensors = {"residual": values.to(self._device)}
        numbers: Mapping[str, Any] = {"numel": values.numel(), "residual_gain": 1.0}
        if store is not None and sum(tensor.nbytes for tensor in store.tensors(name).values()) < values.nbytes:
            tensors = {key: each.clone() for key, each in store.tensors(name).items()}  # the store's memory is freed
            numbers = store.numbers(name)
        self.waiting[name] = _Leftover(tensors, numbers)

    def release(self, name: str) -> Tensor | None:
        """Remove and return the leftover of `name`, for a method that keeps a residual itself."""
        values = self.get(name)
        self.waiting.pop(name, None)
        return values

    def add_to_(self, view: ParamView) -> None:
        """Add the leftover of the view's parameter to its gradient, in place."""
        name = view.spec.name
        if name not in self.waiting or not view.x.any():
            return
        self._added[name] = self.waiting.pop(name)
        values = self._added[name].read()
        view.x.add_(view.rows(values) if view.spec.sharded else values)

    def commit(self, names: Collection[str]) -> None:
        for name in names:
            self._added.pop(name, None)

    def roll_back(self, names: Collection[str]) -> None:
        """Add the leftovers of these parameters to the next gradients instead."""
        self.waiting.update({name: self._added.pop(name) for name in names if name in self._added})

    @contextmanager
    def taken_back(self, names: Collection[str]) -> Iterator[None]:
        added, waiting = self._added, self.waiting
        self.waiting = waiting | {name: added[name] for name in names if name in added}
        try:
            yield
        finally:
            self.waiting = waiting

    def rescale_(self, factor: float, names: Iterable[str] | None = None) -> None:
        """None: of all parameters."""
        for kept in (self.waiting, self._added):
            for name in kept if names is None else kept.keys() & set(names):
                kept[name].factor *= factor

    def forget(self) -> None:
        self.waiting, self._added = {}, {}
