"""One model's gradient synchronisation on one rank: methods, their state, and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.exchange import StepContext
from lowbit_strategy.collectives.layout import Cut, dim0_cut, flat_cut
from lowbit_strategy.engine.bucket import Bucket, BucketLayout, BucketObserver
from lowbit_strategy.engine.carryover import CarryOver
from lowbit_strategy.engine.residual_store import CodecStore
from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32
from lowbit_strategy.methods._base.base import (
    Assignment,
    CodecPair,
    Compressor,
    Method,
    Reducer,
    ReducerState,
    View,
    assign_all,
)
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


class Stateful(Protocol):
    """Something else that is saved and restored with the residuals: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Listener(Protocol):
    """Someone who measures or decides. Called on all ranks at the same point, when no collective is under way.

    In order at the beginning of a step, in reverse at its end: those that regroup stand first, those that measure last.
    """

    def begin_step(self) -> None:
        """Before anything of a step is reduced; may regroup, and put a tap on the step's buckets."""

    def end_step(self, *, counted: bool) -> None:
        """The step is over and the taps are off. `counted`: it did not overflow."""


class _Carried(NamedTuple):
    """One parameter's state on its way to another grouping: as it lies, or, for another method, what is still owed."""

    tensors: dict[str, Tensor]
    carryover: Tensor | None


def residual_gain_of(method: Method, *, downlink: bool = False) -> float:
    """Residual per unit that is owed; 1 where a method gives no law."""
    residual_gain = (
        (method.downlink if downlink else method.uplink).residual_gain
        if isinstance(method, CodecPair)
        else method.residual_gain
    )
    return 1.0 if residual_gain is None or math.isinf(residual_gain) else residual_gain


class GradientSync:
    """Turns buckets of local gradients into buckets of mean gradients.

    Time is counted in optimizer steps: the framework's adapter calls `end_step` after every one (skipped ones too).
    Without such calls a step ends when a bucket comes round again.

    Args:
        compressor: Gives every parameter its method.
        specs: All trainable parameters, in the same order on all ranks.
        comm: Group to reduce over; used by nothing else.
        device: Of gradients.
        scatter: FSDP2's reduce-scatter (sum of the owned chunk) instead of DDP's all-reduce (mean).
        seed: Of all randomness; the same on all ranks.
        rollback: Keep a copy of the residuals through the step and put it back if the step overflowed (fp16 with
            loss scaling: the optimizer skips such a step).
    """

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        comm: Comm,
        device: torch.device,
        *,
        scatter: bool,
        seed: int = 0,
        rollback: bool = False,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.comm = comm
        self.device = device
        self.scatter = scatter
        self.seed = seed
        self.rollback = rollback
        self.step_index = 0
        self.num_skipped = 0
        self.loss_scale: float | None = None
        self._asked_scale: float | None = None
        self._entered: set[BucketLayout] = set()
        self.collected: dict[Reducer, list[list[View]]] = {}  # whole-model methods: the views of each bucket so far
        self.carryover = CarryOver(comm.world_size)
        self.extra_state: dict[str, Stateful] = {"carryover": self.carryover}  # what is saved beside methods' own state
        self.listeners: list[Listener] = []
        self.bucket_observers: list[BucketObserver] = []  # of the step under way
        self.said: dict[str, View] | None = None  # while set, reducers tell what they said in views kept here
        self.use(compressor)

    # -- methods ------------------------------------------------------------------------------------------------

    def use(self, compressor: Compressor) -> None:
        """Give every parameter its method anew. Residuals are carried over; between steps only."""
        compressor.check(list(self.specs.values()))
        self.compressor = compressor
        self._phase = compressor.at(self.step_index)
        self.assign(assign_all(self._phase, list(self.specs.values())))

    def extend(self, specs: Sequence[TensorSpec]) -> None:
        """Serve more parameters, the same on all ranks; the others keep their state. Between steps only."""
        if not specs:
            return
        self.specs |= {spec.name: spec for spec in specs}
        self.assign(assign_all(self._phase, list(self.specs.values())))

    def forget(self) -> None:
        """All state as at the start; methods stay. Between steps only."""
        self.carryover.forget()
        self._group(self.assignments)

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Regroup: parameters whose method stays keep their state; what the others still owe is owed by the new one.

        Under a new method that keeps no residual it is added to the next gradient.
        """
        carried = {name: self._release(name, assignments[name]) for name in getattr(self, "assignments", {})}
        shared = {method: state.get("", {}) for method, state in getattr(self, "reducers", {}).items()}
        self._group(assignments)
        for name, kept in carried.items():
            self._take_over_(name, kept)
        for method, state in self.reducers.items():  # a method's own state, where its other parameters still fit it
            for key, value in state.get("", {}).items():
                if (old := shared.get(method, {}).get(key)) is not None and old.shape == value.shape:
                    value.copy_(old)

    def _group(self, assignments: Mapping[str, Assignment]) -> None:
        """Fresh state for everything, and no plans yet."""
        self.assignments = dict(assignments)
        groups: dict[object, list[str]] = {}
        for name, assignment in assignments.items():
            groups.setdefault(assignment.method, []).append(name)
        self.codecs: dict[CodecPair, CodecStore] = {}
        self.reducers: dict[Reducer, ReducerState] = {}
        for method, names in groups.items():
            if isinstance(method, CodecPair):
                cuts = {name: self.cut(name, method.uplink.block_size) for name in names}
                self.codecs[method] = CodecStore(method, cuts, self.comm.rank, self.device, scatter=self.scatter)
            elif isinstance(method, Reducer):
                self.reducers[method] = method.init([self.specs[name] for name in names], self.device)
        self._buckets: dict[BucketLayout, Bucket] = {}
        self._flags: list[Tensor] = []
        self._backup: list[Tensor] = []

    def _release(self, name: str, following: Assignment) -> _Carried:
        """What one parameter takes along to its next method."""
        method = self.assignments[name].method
        successor = following.method
        if successor == method or (isinstance(successor, Reducer) and successor.continues(method)):
            return _Carried({key: value.clone() for key, value in self.tensors(name).items()}, None)
        carryover = self.export_residual(name)
        if carryover is not None:
            carryover /= residual_gain_of(method)
        if isinstance(method, CodecPair) and (owner := self.export_owner_residual(name)) is not None:
            cut = self.cut(name, method.uplink.block_size)
            start = self.comm.rank * cut.row_numel  # the owner owes the mean, a sender a W-th of what it says
            carryover = torch.zeros(cut.numel, device=self.device) if carryover is None else carryover
            carryover[start : start + owner.numel()] += owner * (
                cut.world_size / residual_gain_of(method, downlink=True)
            )
        if (leftover := self.carryover.release(name)) is not None:
            carryover = leftover if carryover is None else carryover.add_(leftover)
        return _Carried({}, carryover)

    def _take_over_(self, name: str, carried: _Carried) -> None:
        for key, value in self.tensors(name).items():
            if key in carried.tensors:
                value.copy_(carried.tensors[key])
        if carried.carryover is not None:
            self.carry_over_(name, carried.carryover)

    def carry_over_(self, name: str, carryover: Tensor) -> None:
        """Make `owed`, in units of the gradient, the parameter's residual, or say it with the next gradient."""
        if self.export_residual(name) is None:
            self.carryover.keep(name, carryover)
        else:
            self.import_residual_(name, carryover * residual_gain_of(self.assignments[name].method))

    def cut(self, name: str, block_size: int) -> Cut:
        spec = self.specs[name]
        if self.scatter:
            return dim0_cut(spec.shape, self.comm.world_size)
        return flat_cut(spec.numel, self.comm.world_size, block_size)

    def codec_store(self, name: str) -> CodecStore | None:
        method = self.assignments[name].method
        return self.codecs[method] if isinstance(method, CodecPair) else None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All state of one parameter, as views."""
        method = self.assignments[name].method
        if isinstance(method, CodecPair):
            return self.codecs[method].tensors(name)
        return self.reducers[method].get(name, {})

    def export_residual(self, name: str) -> Tensor | None:
        if (store := self.codec_store(name)) is not None:
            return store.export_residual(name)
        residual = self.tensors(name).get("residual")
        return None if residual is None else residual.float().clone()

    def export_owner_residual(self, name: str) -> Tensor | None:
        store = self.codec_store(name)
        return None if store is None else store.export_owner_residual(name)

    def import_residual_(self, name: str, values: Tensor) -> None:
        if (store := self.codec_store(name)) is not None:
            store.import_residual_(name, values)
        elif "residual" in (tensors := self.tensors(name)):
            tensors["residual"].copy_(values)

    # -- reducing -----------------------------------------------------------------------------------------------

    def bucket(self, layout: BucketLayout) -> Bucket:
        if layout not in self._buckets:
            self._buckets[layout] = Bucket(self, layout)
        return self._buckets[layout]

    def reduce(self, layout: BucketLayout, x: Tensor, out: Tensor) -> Iterator[Pending | None]:
        """Reduce one bucket; yields while bytes travel (None: waiting for the step's other buckets).

        All ranks run the same buckets and advance them in the same order.
        """
        if layout in self._entered:
            self.end_step()
        if not self._entered:
            self._begin_step()
        self._entered.add(layout)
        return self.bucket(layout).run(x, out, self.step())

    def step(self) -> StepContext:
        shared = hash32(hash32(self.seed) + self.step_index)
        return StepContext(self.step_index, hash32(shared + GOLDEN * (self.comm.rank + 1)), shared)

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether anything has been reduced since the last `end_step`."""
        return bool(self._entered)

    @property
    def num_buckets(self) -> int:
        """Buckets of the step under way that have been handed in; all of them once the last one has."""
        return len(self._entered)

    def set_loss_scale(self, scale: float) -> None:
        """The factor that the coming gradients are multiplied by; residuals follow when it changes."""
        self._asked_scale = scale

    def follow_phase(self) -> None:
        """Regroup if the compressor has another configuration for this step."""
        phase = self.compressor.at(self.step_index)
        if phase != self._phase:
            self._phase = phase
            self.assign(assign_all(phase, list(self.specs.values())))

    def _begin_step(self) -> None:
        for listener in self.listeners:
            listener.begin_step()
        self.follow_phase()
        if self._asked_scale is not None:
            if self.loss_scale is not None and self._asked_scale != self.loss_scale:
                self._scale_residuals_(self._asked_scale / self.loss_scale)
            self.loss_scale = self._asked_scale
        if self.rollback and (arenas := self.state_tensors()):  # dense and stateless methods have none
            if not self._backup:
                self._backup = [torch.empty_like(arena) for arena in arenas]
            torch._foreach_copy_(self._backup, arenas)

    def end_step(self) -> bool:
        """The optimizer has stepped, or a loss scaler has skipped the step. Call on all ranks.

        Returns:
            Whether the step counted: False if it overflowed and the residuals were put back.
        """
        counted = True
        if self._entered and self.rollback and self._overflowed():
            if self._backup:
                torch._foreach_copy_(self.state_tensors(), self._backup)
            self.num_skipped += 1
            counted = False
        for flag in self._flags:
            flag.zero_()
        self.carryover.settle(counted=counted)
        entered, self._entered = self._entered, set()
        if entered or self.comm.world_size == 1:  # a second optimizer may have stepped; FSDP2 skips us on one rank
            self.step_index += counted
        self.bucket_observers = []
        if entered:
            for listener in reversed(self.listeners):  # who came last measures what the others add
                listener.end_step(counted=counted)
        return counted

    def _overflowed(self) -> bool:
        total = torch.stack([flag.view(()) for flag in self._flags]).amax().view(1)
        self.comm.all_reduce(total, dist.ReduceOp.MAX).wait()
        return bool(total.item())

    def add_flag(self, flag: Tensor) -> None:
        self._flags.append(flag)

    def state_tensors(self) -> list[Tensor]:
        codecs = [arena for store in self.codecs.values() for arena in store.arenas()]
        return codecs + [t for state in self.reducers.values() for tensors in state.values() for t in tensors.values()]

    def _scale_residuals_(self, factor: float) -> None:
        for store in self.codecs.values():
            for arena in store.residual_arenas():
                arena.mul_(factor)
        for method, state in self.reducers.items():
            method.rescale_(state, factor)
        self.carryover.rescale_(factor)

    # -- accounting ---------------------------------------------------------------------------------------------

    @property
    def residual_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_tensors())

    def sent_nbytes(self, name: str) -> int:
        """Bytes this rank hands to others for one reduction of a parameter, headers and padding aside."""
        method, spec, world_size = self.assignments[name].method, self.specs[name], self.comm.world_size
        if isinstance(method, Reducer):
            return method.wire_nbytes(spec, world_size, scatter=self.scatter)
        row = self.cut(name, method.uplink.block_size).row_numel
        hops = (method.uplink,) if self.scatter else (method.uplink, method.downlink)
        return sum(stateful.wire_nbytes(row) for stateful in hops) * (world_size - 1)
