"""Copies of methods' state, taken before a reduction changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.methods._base.method import MethodStore
from lowbit_strategy.methods._base.residuals import HOPS, RESIDUAL, SCALE, read_residual, write_residual_


class Copies:
    """Copies of parameters' state before their reductions. Memory is allocated once for all parameters of a store.

    Args:
        state: The state to copy; its stores must stay the same.
    """

    def __init__(self, state: MethodState) -> None:
        self._state = state
        self._by_name: dict[str, StateTensors] = {}
        self._mirrors: dict[MethodStore, list[Tensor]] = {}  # one per tensor of the store, in order
        self._runs: dict[tuple[str, ...], tuple[list[Tensor], list[Tensor]]] = {}  # copies and their originals

    def of(self, name: str) -> StateTensors:
        """Return the copy of one parameter's state, which must have been taken."""
        return self._by_name.get(name, {})

    def take(self, names: tuple[str, ...]) -> None:
        """Copy these parameters' state, with one operation per run of neighbors."""
        if names not in self._runs:
            stores = list(dict.fromkeys(map(self._state.store, names)))
            pairs = [pair for store in stores for pair in self._pairs(store, names)]
            self._runs[names] = [copy for copy, _ in pairs], [source for _, source in pairs]
        copies, sources = self._runs[names]
        if copies:  # dense and stateless methods have no state
            torch._foreach_copy_(copies, sources)

    def _pairs(self, store: MethodStore, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of copies and originals, for the parameters `names` of one store."""
        if store not in self._mirrors:
            self._allocate(store)
        mine = {name: store.state[name] for name in names if store.state.get(name)}
        if not store.arenas:
            for name, tensors in mine.items():
                yield from ((self._by_name[name][key], tensor) for key, tensor in tensors.items())
            return
        for arena, mirror in zip(store.arenas, self._mirrors[store], strict=True):
            for start, stop in _runs(arena, mine):
                yield mirror[start:stop], arena[start:stop]

    def _allocate(self, store: MethodStore) -> None:
        self._mirrors[store] = mirrors = [torch.empty_like(arena) for arena in store.arenas]
        for name, tensors in store.state.items():
            if not mirrors:
                self._by_name[name] = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
                continue
            self._by_name[name] = {}
            for key, tensor in tensors.items():
                mirror = next(m for m, arena in zip(mirrors, store.arenas, strict=True) if _lies_in(tensor, arena))
                start = tensor.storage_offset()
                self._by_name[name][key] = mirror[start : start + tensor.numel()].view_as(tensor)


def _lies_in(tensor: Tensor, arena: Tensor) -> bool:
    return tensor._base is arena


def _runs(arena: Tensor, mine: Mapping[str, StateTensors]) -> list[tuple[int, int]]:
    """Where these parameters' tensors lie in an arena; neighbors form one run."""
    parts = [tensor for tensors in mine.values() for tensor in tensors.values() if _lies_in(tensor, arena)]
    places = [(int(part.storage_offset()), part.numel()) for part in parts]
    found: list[tuple[int, int]] = []
    for start, stop in sorted((start, start + numel) for start, numel in places):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif stop > start:
            found.append((start, stop))
    return found


def copy_(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for key, tensor in targets.items():
        tensor.copy_(sources[key])


def move_toward_(targets: StateTensors, sources: StateTensors, share: float) -> None:
    """Move one parameter's state toward `sources` by the fraction `share`. Values that cannot be averaged stay, or are
    taken from `sources` if `share` is 1.
    """
    if share == 1.0:
        copy_(targets, sources)
        return
    coded = [hop for hop in HOPS if hop + SCALE in targets]
    for hop in coded:
        values, other = read_residual(targets, hop), read_residual(sources, hop)
        assert values is not None
        assert other is not None
        write_residual_(targets, values.lerp(other, share), hop)
    done = {hop + key for hop in coded for key in (RESIDUAL, SCALE)}
    for key, tensor in targets.items():
        if key not in done and tensor.is_floating_point():
            tensor.lerp_(sources[key], share)
