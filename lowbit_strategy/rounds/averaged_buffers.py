"""What a model has beside trained parameters, where ranks train by themselves: averaged, or each rank's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.model.parts import local_part


class AveragedBuffers:
    """Each rank's own buffers and frozen parameters, and what all ranks share of them.

    * Buffers of floating point, such as BatchNorm's, are averaged. What travels is how a buffer has changed since the
      last average: one that never changes, such as a mask with infinite entries, stays as it is to the bit.
    * Frozen parameters are watched: where one differs between ranks (a teacher that follows the rank's own student) it
      is averaged from then on. The others cost nothing.
    * Of anything else, such as counts, there is no mean: it is this rank's own, and is saved with its weights.

    Args:
        beside: Gives buffers and frozen parameters by name, the same on all ranks. Asked whenever they are needed: a
            model may replace its buffers by other tensors.

    Attributes:
        shared: By name.
    """

    def __init__(self, beside: Callable[[], Mapping[str, Tensor]]) -> None:
        self._beside = beside
        found = beside().items()
        names = [name for name, each in found if each.is_floating_point() and not isinstance(each, nn.Parameter)]
        self.shared = {name: each.detach().clone() for name, each in self._live(names).items()}
        self._reported: set[str] = set()  # has no mean, and differs between ranks
        self._agreed = self._digests()

    @property
    def own(self) -> dict[str, Tensor]:
        """What the model has at present of what is averaged, live."""
        return self._live(self.shared)

    @property
    def private(self) -> dict[str, Tensor]:
        """Likewise of what is not: what has no mean, and frozen parameters that have changed since all had the same."""
        now, beside = self._digests(), self._beside()
        as_agreed = {name for name, digest in now.items() if digest == self._agreed.get(name)}
        same = {name for name in as_agreed if isinstance(beside[name], nn.Parameter)}
        return self._live(name for name in beside if name not in self.shared and name not in same)

    def _live(self, names: Iterable[str]) -> dict[str, Tensor]:
        beside = self._beside()
        return {name: local_part(beside[name]) for name in names if name in beside}

    def _digests(self) -> dict[str, int]:
        """Of the bits of all that is not averaged and may have to be."""
        return self._digests_of(name for name in self._beside() if name not in {*self.shared, *self._reported})

    def _digests_of(self, names: Iterable[str]) -> dict[str, int]:
        found = self._live(names)
        tensors = list(found.values())
        return dict(zip(found, digests(tensors, tensors[0].device).tolist(), strict=True)) if found else {}

    def meet(self, comm: Comm, device: torch.device) -> None:
        """Steps become local, on all ranks together: what is averaged and differs between them begins at the mean.

        Args:
            comm: To the ranks that have the same part of the model.
            device: Of its collectives.
        """
        for name in _differing(self._digests_of(self.shared), comm, device):
            self._begin_at_mean_(name, comm, device)

    def compare(self, comm: Comm, device: torch.device) -> list[str]:
        """In a turn, on all ranks: what differs between them and has a mean becomes that, and travels with the other
        changes from the next turn on. Arguments as of `meet`.

        Returns:
            Names of what has no mean, each once.
        """
        without_mean = []
        for name in _differing(self._digests(), comm, device):
            if self._beside()[name].is_floating_point():
                self._begin_at_mean_(name, comm, device)
            else:
                without_mean.append(name)
        self._reported |= {*without_mean}
        self._agreed = self._digests()
        return without_mean

    @torch.no_grad()
    def _begin_at_mean_(self, name: str, comm: Comm, device: torch.device) -> None:
        own = self._live([name])[name]
        total = own.to(device, torch.float32, copy=True).contiguous()
        comm.all_reduce(total).wait()
        own.copy_(total / comm.world_size)
        self.shared[name] = own.clone()

    @torch.no_grad()
    def changes(self) -> list[Tensor]:
        """float32, flat, for each buffer: this rank's minus the shared one. What has become NaN here counts as
        unchanged: the others' statistics must not suffer from a batch that overflowed.
        """
        buffers = self.own
        pairs = [(buffers[name], shared) for name, shared in self.shared.items()]
        return [
            torch.where((own == shared) | own.isnan(), 0.0, own.float() - shared.float()).reshape(-1)
            for own, shared in pairs
        ]

    @torch.no_grad()
    def take_(self, mean_change_N: Tensor, mix: float) -> None:
        """The shared buffers move by the mean of what `changes` gave on all ranks; the own ones follow."""
        at, buffers = 0, self.own
        for name, shared in self.shared.items():
            change = mean_change_N[at : at + shared.numel()].view_as(shared)
            at += shared.numel()
            shared.copy_(torch.where(change == 0.0, shared.float(), shared.float() + change))
            own = buffers[name]
            mixed = torch.where(own.isnan(), shared, torch.lerp(shared, own, mix)) if mix else shared
            own.copy_(torch.where(own == shared, own, mixed))

    def rebase(self) -> None:
        """What the model has is the same on all ranks now."""
        buffers = self.own
        for name, shared in self.shared.items():
            shared.copy_(buffers[name])
        self._agreed = self._digests()

    @torch.no_grad()
    def use(self, values: Mapping[str, Tensor]) -> None:
        """Put these, as far as there are any, into the model."""
        for name, own in self._live(values).items():
            own.copy_(values[name])

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        for name, live in self._live(state["shared"]).items():
            self.shared.setdefault(name, live.clone()).copy_(state["shared"][name])
        self.use(state["own"] if own else self.shared)
        if own:
            self._agreed = self._digests()
            self.use(state.get("private", {}))


def _differing(mine: Mapping[str, int], comm: Comm, device: torch.device) -> list[str]:
    """On all ranks: names whose digests differ between them. One number is gathered, and all if that differs."""
    mine_N = torch.tensor(list(mine.values()), dtype=torch.int64, device=device)
    if not mine or not _differs(_gathered(comm, digests([mine_N], device))).any():
        return []
    differs_N = _differs(_gathered(comm, mine_N)).tolist()
    return [name for name, differs in zip(mine, differs_N, strict=True) if differs]


def _differs(each_WN: Tensor) -> Tensor:
    return (each_WN != each_WN[0]).any(0)


def _gathered(comm: Comm, mine_N: Tensor) -> Tensor:
    """Of all ranks."""
    everyone_WN = mine_N.new_empty(comm.world_size, mine_N.numel())
    comm.all_gather(everyone_WN, mine_N).wait()
    return everyone_WN
