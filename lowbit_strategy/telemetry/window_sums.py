"""Gradients added up over a controller's window: saved in one layout, loaded into any other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import ParamView, add_ranges_, in_memory_order
from lowbit_strategy.control.base import Accumulate
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.measure import StepMeasure

STATE_KEY = "window"
Ranges = list[list[int]]


class WindowSums:
    """Sums of ``local`` gradients, each rank's own, or of ``mean`` ones, as far as a rank gets them.

    Args:
        sync: The engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._gradient: Accumulate = "local"
        self.forget()
        sync.save_parts(STATE_KEY, self)

    def forget(self) -> None:
        """The window begins again."""
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}  # of each step's norm, added up
        self.num_steps = 0

    def add(self, view: ParamView, gradient: Accumulate, *, square: bool) -> None:
        """Add a step's gradient; a mean one once `view` has been reduced."""
        peers, self._gradient = self._peers(view.name), gradient
        factor = 1.0 / (self._sync.loss_scale or 1.0)
        values = view.flat()
        if gradient == "mean":
            values = view.out
            if view.spec.sharded:
                values, factor = values[: view.row_length(peers.rank)], factor / peers.world_size
        if view.name not in self._sums:
            self._sums[view.name] = torch.zeros_like(values, dtype=torch.float32)
        if self._sync.skips_overflow:  # a step that overflows is not taken: it must not spoil the sum
            values = values.nan_to_num(0.0, 0.0, 0.0)
        self._sums[view.name].add_(values, alpha=factor)
        if square:
            norm = torch.linalg.vector_norm(values, dtype=torch.float32) * factor
            before = self._squares.get(view.name)
            self._squares[view.name] = norm.square() if before is None else before + norm.square()

    def read(self) -> dict[str, Any]:
        """Telemetry of the window, summed over ranks; the next one begins."""
        names, zero = list(self._sync.specs), torch.zeros((), device=self._sync.device)
        measure = StepMeasure(self._sync)
        measure.rows["squares"] = {
            name: torch.stack([values.square().sum(), self._squares.get(name, zero).to(values.dtype)])
            / self._num_holders(name)
            for name, values in self._sums.items()
        }
        total = measure.summed({"squares": 2})[0]["squares"]
        shown: dict[str, Any] = {
            "accumulated_norm": dict(zip(names, total[:, 0].sqrt().tolist(), strict=True)),
            "accumulated_square": dict(zip(names, total[:, 1].tolist(), strict=True)) if self._squares else {},
            "accumulated_steps": self.num_steps,
        }
        self.forget()
        return shown

    def _num_holders(self, name: str) -> int:
        """Ranks that have the same values."""
        shared = self._gradient == "mean" and not self._sync.specs[name].sharded
        return self._peers(name).world_size if shared else 1

    def _peers(self, name: str) -> Comm:
        return self._sync.state.ranks_of(name).peers

    def _ranges(self, name: str) -> Ranges:
        """Where this rank's values lie in the flat parameter: start and length of each run."""
        spec, peers = self._sync.specs[name], self._peers(name)
        ranges = [[0, spec.numel]] if spec.whole_shape is None else [list(run) for run in spec.ranges]
        if self._gradient == "local" or not spec.sharded:
            return ranges
        row_numel = self._sync.state.row_numel(name)
        return _slice(ranges, peers.rank * row_numel, (peers.rank + 1) * row_numel)

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        sums = {
            name: {
                "shape": list(self._sync.specs[name].whole.shape),
                "memory_order": self._sync.specs[name].memory_order,
                "ranges": self._ranges(name),
                "values": values,
            }
            for name, values in self._sums.items()
        }
        squares = {name: float(square) for name, square in self._squares.items()}
        return {"gradient": self._gradient, "num_steps": self.num_steps, "sums": sums, "squares": squares}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]]) -> None:
        self.forget()
        rest = iter(states)
        own = next(rest)
        self._gradient, self.num_steps = own["gradient"], own["num_steps"]
        names = [name for name in own["sums"] if name in self._sync.specs]
        parts = {name: (own["sums"][name]["values"], own["squares"].get(name)) for name in names}
        if any(not self._fits(name, own["sums"][name]) for name in names):
            parts = self._cut(names, own, rest)
        device = self._sync.device
        self._sums = {name: values.to(device, copy=True) for name, (values, _) in parts.items()}
        self._squares = {
            name: torch.tensor(square, dtype=torch.float32, device=device)
            for name, (_, square) in parts.items()
            if square is not None
        }

    def _fits(self, name: str, saved: Mapping[str, Any]) -> bool:
        return bool(
            saved["ranges"] == self._ranges(name) and saved["memory_order"] == self._sync.specs[name].memory_order
        )

    def _cut(
        self, names: Sequence[str], own: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
    ) -> dict[str, tuple[Tensor, float | None]]:
        """Parameters put together from what ranks have saved of them, and of each this rank's part."""
        wholes = {name: _Whole(own["sums"][name]["shape"]) for name in names}
        for saved in itertools.chain([own], others):
            complete = [whole.add(saved, name) for name, whole in wholes.items()]
            if all(complete):
                break
        parts = {}
        for name, whole in wholes.items():
            spec, ranges = self._sync.specs[name], self._ranges(name)
            values = in_memory_order(
                whole.values, own["sums"][name]["shape"], own["sums"][name]["memory_order"], spec.memory_order
            )
            part = torch.cat([values[start : start + length] for start, length in ranges] or [values[:0]])
            share = part.numel() / max(values.numel(), 1)
            parts[name] = (part, whole.square * share if name in own["squares"] else None)
        return parts


class _Whole:
    """One parameter's sum, put together from parts. What several ranks have is taken from the first."""

    def __init__(self, shape: Sequence[int]) -> None:
        numel = torch.Size(shape).numel()
        self.values, self._known = torch.zeros(numel), torch.zeros(numel, dtype=torch.bool)
        self.square = 0.0

    def add(self, saved: Mapping[str, Any], name: str) -> bool:
        """Returns whether it is complete."""
        part = saved["sums"].get(name)
        if part is not None and not all(bool(self._known[at : at + length].all()) for at, length in part["ranges"]):
            add_ranges_(self.values, part["ranges"], part["values"])
            for start, length in part["ranges"]:
                self._known[start : start + length] = True
            self.square += saved["squares"].get(name, 0.0)
        return bool(self._known.all())


def _slice(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The ranges of elements `start` to `stop` of what lies in `ranges`, joined."""
    found, before = [], 0
    for at, length in ranges:
        first, last = max(start - before, 0), min(stop - before, length)
        if first < last:
            found.append([at + first, last - first])
        before += length
    return found
