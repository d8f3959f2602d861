"""Sums of gradients over a controller's window, which can be saved in one layout and loaded into any other."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import ParamView, add_part_, in_memory_order, views_at
from lowbit_strategy.control.base import Accumulate
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.transaction_listener import TransactionListener
from lowbit_strategy.telemetry.measure import StepMeasure

STATE_KEY = "window"
Runs = list[list[int]]


@dataclass
class _Sum:
    """The sum of one parameter's gradients.

    Args:
        values: float32, with the gradient's shape.
        square: The sum of their squared norms; None: not requested.
    """

    values: Tensor
    square: Tensor | None = None

    def add_(self, other: _Sum) -> None:
        self.values.add_(other.values)
        if other.square is not None:
            self.square = other.square if self.square is None else self.square + other.square


_Sums = dict[str, _Sum]


def _move(names: Iterable[str], source: _Sums, target: _Sums) -> None:
    """Add the sums of these parameters in `source` to those in `target`."""
    for name in [name for name in names if name in source]:
        part = source.pop(name)
        if name in target:
            target[name].add_(part)
        else:
            target[name] = part


class WindowSums(TransactionListener):
    """Sums of each rank's ``local`` gradients, or of this rank's part of the ``mean`` gradient. Discarded gradients do
    not count.

    Args:
        sync: The engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._gradient: Accumulate = "local"
        self.forget()
        sync.save_per_rank(STATE_KEY, self)
        sync.transactions.add(self)

    def forget(self) -> None:
        """Restart the window, with nothing open."""
        self._sums: _Sums = {}
        self._open: _Sums = {}  # of reductions that may still be discarded
        self._aside: _Sums = {}  # of reductions that were set aside
        self._num_steps = 0

    def count_step(self) -> None:
        """A step that added gradients has counted."""
        self._num_steps += 1

    def accumulate(self, gradient: Accumulate) -> None:
        """Add up gradients of this kind from now on, in a new window unless the kind is unchanged."""
        if gradient != self._gradient:
            self.forget()
            self._gradient = gradient

    def add(self, view: ParamView, *, square: bool) -> None:
        """Add a reduction's gradient; for the mean, once `view` has been reduced."""
        peers = self._peers(view.name)
        factor = 1.0 / (self._sync.loss_scale or 1.0)
        values = view.flat()
        if self._gradient == "mean":
            values = view.out
            if view.spec.sharded:
                values, factor = values[: view.row_length(peers.rank)], factor / peers.world_size
        part = _Sum(values.float() * factor)
        if square:
            part.square = torch.linalg.vector_norm(part.values).square()
        _move([view.name], {view.name: part}, self._open)

    def commit(self, names: Collection[str]) -> None:
        _move(names, self._open, self._sums)

    def roll_back(self, names: Collection[str]) -> None:
        _move(names, self._open, {})

    def set_aside(self, names: Collection[str]) -> None:
        _move(names, self._open, self._aside)

    def settle(self, names: Collection[str], *, used: bool) -> None:
        _move(names, self._aside, self._sums if used else {})

    def _commit_late(self) -> None:
        """Add sums that were under way when their reductions were committed."""
        self.commit(self._open.keys() - self._sync.transactions.open)

    def read(self) -> dict[str, Any]:
        """Return the window's telemetry, summed over ranks, and begin the next window."""
        self._commit_late()
        names, zero = list(self._sync.specs), torch.zeros((), device=self._sync.device)
        measure = StepMeasure(self._sync)
        measure.rows["squares"] = {
            name: torch.stack([each.values.square().sum(), zero if each.square is None else each.square])
            / self._num_holders(name)
            for name, each in self._sums.items()
        }
        total = measure.summed({"squares": 2})[0]["squares"]
        has_squares = any(each.square is not None for each in self._sums.values())
        shown: dict[str, Any] = {
            "accumulated_norm": dict(zip(names, total[:, 0].sqrt().tolist(), strict=True)),
            "accumulated_square": dict(zip(names, total[:, 1].tolist(), strict=True)) if has_squares else {},
            "accumulated_steps": self._num_steps,
        }
        self._sums, self._num_steps = {}, 0
        return shown

    def _num_holders(self, name: str) -> int:
        """The number of ranks that have the same values."""
        shared = self._gradient == "mean" and not self._sync.specs[name].sharded
        return self._peers(name).world_size if shared else 1

    def _peers(self, name: str) -> Comm:
        return self._sync.state.ranks_of(name).peers

    def _runs(self, name: str) -> Runs:
        """The places of this rank's values in the flat parameter, as start and length of each run."""
        spec, peers = self._sync.specs[name], self._peers(name)
        if self._gradient == "local" or not spec.sharded:
            return spec.runs
        row_numel = self._sync.state.row_numel(name)
        return _slice(spec.runs, peers.rank * row_numel, (peers.rank + 1) * row_numel)

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._commit_late()
        sums = {
            name: {
                "shape": list(self._sync.specs[name].whole.shape),
                "memory_order": self._sync.specs[name].memory_order,
                "runs": self._runs(name),
                "values": each.values,
            }
            for name, each in self._sums.items()
        }
        squares = {name: float(each.square) for name, each in self._sums.items() if each.square is not None}
        return {"gradient": self._gradient, "num_steps": self._num_steps, "sums": sums, "squares": squares}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        self.forget()
        rest = iter(states)
        mine = next(rest)
        self._gradient, self._num_steps = mine["gradient"], mine["num_steps"]
        names = [name for name in mine["sums"] if name in self._sync.specs]
        parts = {name: (mine["sums"][name]["values"], mine["squares"].get(name)) for name in names}
        if any(not self._fits(name, mine["sums"][name]) for name in names):  # even if `own`: DDP and FSDP2 differ
            parts = self._cut(names, mine, rest)
        device = self._sync.device
        for name, (values, square) in parts.items():
            known = None if square is None else torch.tensor(square, dtype=torch.float32, device=device)
            self._sums[name] = _Sum(values.to(device, copy=True), known)

    def _fits(self, name: str, saved: Mapping[str, Any]) -> bool:
        return bool(saved["runs"] == self._runs(name) and saved["memory_order"] == self._sync.specs[name].memory_order)

    def _cut(
        self, names: Sequence[str], own: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
    ) -> dict[str, tuple[Tensor, float | None]]:
        """Cut this rank's part of each parameter from all ranks' saved sums."""
        wholes = {name: _Whole(own["sums"][name]["shape"]) for name in names}
        for saved in itertools.chain([own], others):
            complete = [whole.add(saved, name) for name, whole in wholes.items()]
            if all(complete):
                break
        parts = {}
        for name, whole in wholes.items():
            spec, runs = self._sync.specs[name], self._runs(name)
            values = in_memory_order(
                whole.values, own["sums"][name]["shape"], own["sums"][name]["memory_order"], spec.memory_order
            )
            part = torch.cat([values[:0], *views_at(values, runs)])
            share = part.numel() / max(values.numel(), 1)
            parts[name] = (part, whole.square * share if name in own["squares"] else None)
        return parts


class _Whole:
    """One parameter's sum, assembled from parts. If several ranks have a part, the first one's is used."""

    def __init__(self, shape: Sequence[int]) -> None:
        numel = torch.Size(shape).numel()
        self.values, self._known = torch.zeros(numel), torch.zeros(numel, dtype=torch.bool)
        self.square = 0.0

    def add(self, saved: Mapping[str, Any], name: str) -> bool:
        """Add a rank's saved sum. Return whether the parameter is complete."""
        part = saved["sums"].get(name)
        known = [] if part is None else views_at(self._known, part["runs"])
        if not all(bool(each.all()) for each in known):
            add_part_(self.values, part["runs"], part["values"])
            for each in known:
                each.fill_(True)
            self.square += saved["squares"].get(name, 0.0)
        return bool(self._known.all())


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """The runs that hold elements `start` to `stop` of the joined `runs`."""
    found, before = [], 0
    for at, length in runs:
        first, last = max(start - before, 0), min(stop - before, length)
        if first < last:
            found.append([at + first, last - first])
        before += length
    return found
