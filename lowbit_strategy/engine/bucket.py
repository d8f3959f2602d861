"""One bucket of gradients: which exchange or method reduces each of its parameters, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.collectives.exchange import Exchange, StepContext
from lowbit_strategy.collectives.layout import Slot
from lowbit_strategy.methods._base.base import CodecPair, Reducer, ReducerState, View

if TYPE_CHECKING:
    from lowbit_strategy.engine.engine import GradientSync


class Entry(NamedTuple):
    """One parameter in a bucket: its name and the place of its first element (FSDP2: in every row)."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What a bucket holds.

    Args:
        entries: Parameters and their places.
        row_numel: FSDP2: elements of one rank's row; the input is ``[W * row_numel]``. None under DDP.
        last: DDP: the last bucket of the step, on which whole-model methods reduce.
    """

    entries: tuple[Entry, ...]
    row_numel: int | None = None
    last: bool = True


class BucketObserver(Protocol):
    """Someone who looks at every bucket of one step."""

    def observe(
        self, bucket: Bucket, x: Tensor, out: Tensor, stages: Iterator[Pending | None]
    ) -> Iterator[Pending | None]:
        """Yield from `stages`, looking at `x` before they start and at what they left behind."""


class Bucket:
    """One bucket's plan: the shared exchanges of its lanes, and its reducers. Made once per layout."""

    def __init__(self, sync: GradientSync, layout: BucketLayout) -> None:
        self.sync = sync
        self.layout = layout
        self.slots: list[Slot] = []
        by_codec: dict[CodecPair, list[Slot]] = {}
        self.by_reducer: dict[Reducer, list[Slot]] = {method: [] for method in sync.reducers if method.whole_model}
        for name, offset in layout.entries:
            method = sync.assignments[name].method
            cut = sync.cut(name, method.uplink.block_size if isinstance(method, CodecPair) else 1)
            stride = cut.row_numel if layout.row_numel is None else layout.row_numel
            slot = Slot(name, offset, stride, offset, cut)
            self.slots.append(slot)
            if isinstance(method, CodecPair):
                by_codec.setdefault(method, []).append(slot)
            else:
                self.by_reducer.setdefault(method, []).append(slot)
        routes = [sync.codecs[method].route(slots) for method, slots in by_codec.items()]
        self.exchange = Exchange(routes, sync.comm, sync.device, scatter=sync.scatter) if routes else None
        if self.exchange is not None:
            sync.add_flag(self.exchange.flag)
        if self.by_reducer:
            self.reducer_flag = torch.zeros(1, dtype=torch.int32, device=sync.device)
            sync.add_flag(self.reducer_flag)

    def run(self, x: Tensor, out: Tensor, step: StepContext) -> Iterator[Pending | None]:
        stages = self._stages(x, out, step)
        for observer in self.sync.bucket_observers:
            stages = observer.observe(self, x, out, stages)
        return stages

    def _stages(self, x: Tensor, out: Tensor, step: StepContext) -> Iterator[Pending | None]:
        for slot in self.slots:
            if slot.name in self.sync.carryover:
                self.sync.carryover.say_(self.view(slot, x, out))
        if self.exchange is not None:
            yield from self.exchange.run(x, out, step)
        for method, slots in self.by_reducer.items():
            views = [self._open(self.view(slot, x, out)) for slot in slots]
            state = self.sync.reducers[method]
            if method.whole_model and not self.sync.scatter:
                yield from self._collect(method, views, state, step)
            else:
                yield from self._reduce(method, views, state, step)

    def _reduce(
        self, method: Reducer, views: Sequence[View], state: ReducerState, step: StepContext
    ) -> Iterator[Pending | None]:
        yield from method.reduce(views, state, self.sync.comm, step)
        if self.sync.rollback:
            for view in views:
                self.reducer_flag |= (~view.out.isfinite().all()).to(torch.int32)

    def _collect(
        self, method: Reducer, views: list[View], state: ReducerState, step: StepContext
    ) -> Iterator[Pending | None]:
        """Whole-model methods: wait for the last bucket of the step, which reduces for all."""
        sync = self.sync
        sync.collected.setdefault(method, []).append(views)
        if self.layout.last:
            while len(sync.collected[method]) < sync.num_buckets:
                yield None  # this bucket may get here before an earlier one has come so far
            arrived = [view for bucket_views in sync.collected[method] for view in bucket_views]
            yield from self._reduce(method, arrived, state, step)
            del sync.collected[method]  # only now are the other buckets done
            return
        while method in sync.collected:
            yield None

    def _open(self, view: View) -> View:
        """Give the method room to tell what it says, if someone wants to know; NaN stands for what it did not tell."""
        if self.sync.said is None:
            return view
        said = [torch.full((view.spec.numel,), math.nan, device=self.sync.device) for _ in range(2)]
        view = self.sync.said[view.spec.name] = view._replace(compensated=said[0], sent=said[1])
        return view

    def view(self, slot: Slot, x: Tensor, out: Tensor) -> View:
        """One parameter's part of the bucket."""
        spec, cut = self.sync.specs[slot.name], slot.cut
        if self.sync.scatter:
            rows = x.view(self.sync.comm.world_size, -1)[:, slot.x_offset : slot.x_offset + cut.row_numel]
            return View(spec, cut, rows, out[slot.out_offset : slot.out_offset + cut.row_numel], True)
        where = slice(slot.x_offset, slot.x_offset + spec.numel)
        return View(spec, cut, x[where], out[where], False)
