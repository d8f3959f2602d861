"""The method of every parameter, and the state that methods keep between steps.

A replaced method's unsent residual goes to the next method, or is added to the next gradient (`CarryOver`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.carry_over import CarryOver
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all
from lowbit_strategy.methods._base.method import Method, MethodStore
from lowbit_strategy.ranks.ranks import Ranks

StoreKey = tuple[Comm, Method]  # the ranks that reduce, and the method


class MethodState:
    """Methods and residuals of one model's parameters on one rank. Methods that change them are called between steps.

    Args:
        specs: All trainable parameters, in the same order on all ranks.
        ranks: The ranks that reduce them.
        others: The ranks that reduce parameters on a different mesh, by parameter name.
        sharded: Whether FSDP2 shards parameters; otherwise all ranks get the mean.

    Attributes:
        all_ranks: Every `Ranks` that reduces parameters, `ranks` first, in the same order on all ranks.
        specs: The parameters that this rank reduces, or its parts of them, by name.
        full_specs: The whole parameters.
        compressor: Gives every parameter its method, unless another compressor was chosen for it.
        assignments: The method of each parameter, and the reason.
        stores: The state of all parameters that share peers and a method.
        carryover: Unsent residuals that the next method does not keep.
        replaced: Stores that are no longer used, kept until the step has ended, because a stream may still read them.
    """

    compressor: Compressor

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        ranks: Ranks,
        device: torch.device,
        *,
        sharded: bool,
        others: Mapping[str, Ranks] | None = None,
    ) -> None:
        self.carryover = CarryOver(device)
        self._chosen: dict[str, Compressor] = {}
        self._phases: list[Compressor] = []
        self.assignments: dict[str, Assignment] = {}
        self.stores: dict[StoreKey, MethodStore] = {}
        self.replaced: list[MethodStore] = []
        self._members: dict[StoreKey, dict[str, TensorSpec]] = {}  # each store's parameters, in order
        self._others = dict(others or {})
        self._bind(ranks)
        self._device, self._sharded = device, sharded
        self.specs: dict[str, TensorSpec] = {}
        self.full_specs: dict[str, TensorSpec] = {}
        self._add(specs)

    def _add(self, specs: Iterable[TensorSpec]) -> None:
        for spec in specs:
            (part,) = self.ranks_of(spec.name).topology.own_parts([spec], sharded=self._sharded)
            self.specs[part.name] = part
            self.full_specs[part.name] = part if part.whole_shape is None else part.whole

    def ranks_of(self, name: str) -> Ranks:
        return self._others.get(name, self._ranks)

    def _bind(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.all_ranks = [ranks]
        for each in self._others.values():
            if not any(each is known for known in self.all_ranks):
                self.all_ranks.append(each)

    def _key(self, name: str, assignment: Assignment) -> StoreKey:
        return self.ranks_of(name).peers, assignment.method

    # -- methods --------------------------------------------------------------------------------------------------

    def use(self, compressor: Compressor, chosen: Mapping[str, Compressor], step_index: int) -> None:
        compressor.check(list(self.full_specs.values()))
        self.compressor, self._chosen = compressor, dict(chosen)
        self.follow_phase(step_index)

    def phase_ends_before(self, step_index: int) -> bool:
        return self._phases != self._phases_at(step_index)

    def follow_phase(self, step_index: int) -> None:
        self._phases = self._phases_at(step_index)
        self._assign_all()

    def _phases_at(self, step_index: int) -> list[Compressor]:
        return [compressor.phase(step_index) for compressor in self._compressors()]

    def _compressors(self) -> list[Compressor]:
        """The model's compressor, then those chosen for single parameters."""
        return list(dict.fromkeys((self.compressor, *self._chosen.values())))

    def _assign_all(self) -> None:
        phases = dict(zip(self._compressors(), self._phases, strict=True))
        members: dict[Compressor, list[TensorSpec]] = {}
        for name, spec in self.specs.items():
            members.setdefault(phases[self._chosen.get(name, self.compressor)], []).append(spec)
        found = {name: each for phase, specs in members.items() for name, each in assign_all(phase, specs).items()}
        self.assign({name: found[name] for name in self.specs})

    def extend(self, specs: Iterable[TensorSpec]) -> None:
        self._add(specs)
        self._assign_all()

    def forget(self) -> None:
        self.carryover.forget()
        earlier, self.stores, self.assignments, self._members = self.assignments, {}, {}, {}
        self.assign(earlier)

    def move(self, ranks: Ranks, afresh: bool = False) -> None:
        """Reduce with different ranks: state is created again, and what has not been sent yet becomes its residual.

        State stays if this rank's place is the same, unless `afresh`.
        """
        assert not self._others
        before = self._ranks.peers
        self._bind(ranks)
        same = (before.rank, before.world_size) == (ranks.peers.rank, ranks.peers.world_size)
        if same and not afresh:
            self.stores = {(ranks.peers, method): store for (_, method), store in self.stores.items()}
            self._members = {(ranks.peers, method): members for (_, method), members in self._members.items()}
        self.assign(self.assignments)

    def assign(self, assignments: Mapping[str, Assignment]) -> None:
        """Regroup, one parameter at a time. On a GPU, replaced state is moved to the host first.

        1. a store whose parameters stay the same is kept
        2. a parameter whose ranks stay, and whose method stays or continues its old one, keeps all state
        3. otherwise what has not been sent yet becomes the new method's residual; if that has none, it is added to the
           next gradient
        """
        old_stores, before = self.stores, self._members
        earlier = {name: key for key, members in before.items() for name in members}
        after: dict[StoreKey, dict[str, TensorSpec]] = {}
        for name, assignment in assignments.items():
            after.setdefault(self._key(name, assignment), {})[name] = self.specs[name]
        self.assignments, self.stores, self._members = dict(assignments), {}, after
        if before:
            self._set_aside([store for key, store in old_stores.items() if before[key] != after.get(key)])
        for key, members in after.items():
            if before.get(key) == members:
                self.stores[key] = old_stores[key]
                continue
            peers, method = key
            self.stores[key] = store = method.make_store(members, peers, self._device)
            for name in members:
                if (old := earlier.get(name)) is None:
                    continue
                if old[0] is peers and method.continues(old[1]):
                    _copy_where_equal(store.tensors(name), old_stores[old].tensors(name))
                else:
                    self._take_over(name, old_stores[old])

    def _set_aside(self, replaced: Sequence[MethodStore]) -> None:
        """Move replaced state to the host: each state may be as large as the model, so a GPU must not hold both."""
        self.replaced += replaced
        if replaced and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams may still use it
            for store in replaced:
                store.park()

    def _take_over(self, name: str, old_store: MethodStore) -> None:
        """Make what one parameter has not sent yet the residual of its fresh state."""
        leftover = self.carryover.release(name)
        unsent = sum_of_known(old_store.export_unsent(name), leftover)
        if unsent is not None:
            self.carry_over_(name, unsent, old_store if leftover is None else None)

    def carry_over_(self, name: str, unsent: Tensor, store: MethodStore | None = None) -> None:
        """Make `unsent`, in units of the gradient, the residual of a parameter whose state is fresh.

        If its method keeps no residual, it is added to the next gradient, and stored until then in the form that
        `store` uses.
        """
        if not self.store(name).import_unsent_(name, unsent):
            self.carryover.add(name, unsent, store)

    # -- state ----------------------------------------------------------------------------------------------------

    def store(self, name: str) -> MethodStore:
        """The state of the method that serves a parameter."""
        return self.stores[self._key(name, self.assignments[name])]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All state of one parameter, as views."""
        return self.store(name).tensors(name)

    def fresh(self, name: str) -> dict[str, Tensor]:
        """A copy of one parameter's initial state."""
        method = self.assignments[name].method
        peers = self.ranks_of(name).peers
        return method.make_store({name: self.specs[name]}, peers, self._device).tensors(name)

    def residual(self, name: str) -> Tensor | None:
        """The residual that is added to one parameter's next gradient, float32 ``[numel]``; None if there is none."""
        return self.store(name).residual(name)

    def export_unsent(self, name: str) -> Tensor | None:
        """This rank's unsent residual of one parameter, including leftovers, in units of the gradient."""
        return sum_of_known(self.store(name).export_unsent(name), self.carryover.get(name))

    def all_tensors(self) -> list[Tensor]:
        return [tensor for store in self.stores.values() for tensor in store.state_tensors()]

    def row_numel(self, name: str) -> int:
        """Elements of one rank's share of a parameter, padding included."""
        block_size = self.assignments[name].method.block_size
        return self.specs[name].row_numel(self.ranks_of(name).peers.world_size, block_size)

    def sent_nbytes(self, name: str) -> int:
        """Bytes this rank sends to others for one reduction of a parameter, without headers and padding."""
        return self.assignments[name].method.wire_nbytes(self.specs[name], self.ranks_of(name).peers.world_size)

    def rescale_(self, factor: float) -> None:
        for store in self.stores.values():
            store.rescale_(factor)
        self.carryover.rescale_(factor)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())


def sum_of_known(unsent: Tensor | None, leftover: Tensor | None) -> Tensor | None:
    """Sum of a method's unsent residual and an earlier one's leftover; None if neither is known."""
    if unsent is None or leftover is None:
        return leftover if unsent is None else unsent
    return unsent + leftover


def _copy_where_equal(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for key, value in targets.items():
        if (source := sources.get(key)) is not None and source.shape == value.shape:
            value.copy_(source)
