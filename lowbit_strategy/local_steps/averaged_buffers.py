"""A model's state other than trained parameters, averaged over ranks where it has a mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.inform import listed
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.model.differing import differing
from lowbit_strategy.model.parameters import local_part

_log = logging.getLogger("lowbit_strategy")


class Differing(NamedTuple):
    """A value that differs between ranks: the new value (None without a mean), and whether to average it from now
    on.
    """

    value: Tensor | None
    averaged: bool


class AveragedBuffers:
    """A model's state other than trained parameters: values that are averaged over ranks, and values of each rank.

    * Floating-point buffers, such as BatchNorm's, are averaged. Their change since the last average is sent, so one
      that never changes, such as a mask with infinite entries, stays the same bit for bit.
    * Frozen parameters are watched: one that differs between ranks (such as a teacher that follows the rank's student)
      is averaged from then on. The others cost nothing.
    * Anything else, such as counts, cannot be averaged: it stays this rank's own, and is saved with its weights.

    Args:
        untrained: Returns buffers and frozen parameters by name, with the same names on all ranks. Called whenever they
            are needed, since a model may replace its buffers.

    Attributes:
        shared: The shared values, by name.
    """

    def __init__(self, untrained: Callable[[], Mapping[str, Tensor]]) -> None:
        self._untrained = untrained
        found = untrained().items()
        names = [name for name, each in found if each.is_floating_point() and not isinstance(each, nn.Parameter)]
        self.shared = {name: each.detach().clone() for name, each in self._live(names).items()}
        self._reported: set[str] = set()  # values without a mean that differ between ranks
        self._agreed = self._digests()

    @property
    def own(self) -> dict[str, Tensor]:
        """The model's current values of averaged state; tensors are not copied."""
        return self._live(self.shared)

    @property
    def private(self) -> dict[str, Tensor]:
        """The model's other values, without frozen parameters that have not changed since all ranks agreed."""
        now, untrained = self._digests(), self._untrained()
        as_agreed = [name for name, digest in now.items() if digest == self._agreed.get(name)]
        same = {name for name in as_agreed if isinstance(untrained[name], nn.Parameter)}
        return self._live(name for name in untrained if name not in self.shared and name not in same)

    def _live(self, names: Iterable[str]) -> dict[str, Tensor]:
        untrained = self._untrained()
        return {name: local_part(untrained[name]) for name in names if name in untrained}

    def _watched(self) -> dict[str, Tensor]:
        """Values that are not averaged now but may have to be."""
        return self._live(name for name in self._untrained() if name not in {*self.shared, *self._reported})

    def _digests(self) -> dict[str, int]:
        found = self._watched()
        tensors = list(found.values())
        return dict(zip(found, digests(tensors, tensors[0].device).tolist(), strict=True)) if found else {}

    @torch.no_grad()
    def align(self, comm: Comm, device: torch.device) -> None:
        """Begin local steps on all ranks: averaged buffers that differ start at the mean.

        Args:
            comm: The ranks that have the same part of the model.
            device: Device of its collectives.
        """
        for name in differing(self._live(self.shared), comm, device):
            own = self._live([name])[name]
            own.copy_(_mean(own, comm, device, range(comm.world_size)))
            self.shared[name] = own.clone()

    @torch.no_grad()
    def differing(
        self, comm: Comm, device: torch.device, known: Sequence[int], *, floats_only: bool = False
    ) -> dict[str, Differing]:
        """Find what else differs between ranks, by name, without changing anything. Called on all ranks.

        Args:
            comm: See `align`.
            device: See `align`.
            known: Ranks whose values count. If they agree, the other ranks, which are new, get their value.
            floats_only: Compare only values that can be averaged.
        """
        watched, found = self._watched(), {}
        mine = {name: x for name, x in watched.items() if x.is_floating_point() or not floats_only}
        for name, digest_W in differing(mine, comm, device).items():
            own = self._live([name])[name]
            if len({digest_W[rank] for rank in known}) == 1:
                value = own.to(device, copy=True).contiguous()
                comm.broadcast(value, known[0]).wait()
                found[name] = Differing(value, averaged=False)
            elif own.is_floating_point():
                found[name] = Differing(_mean(own, comm, device, known), averaged=True)
            else:
                found[name] = Differing(None, averaged=False)
        return found

    @torch.no_grad()
    def take_differing(self, found: Mapping[str, Differing], *, warns: bool = False) -> None:
        """Replace this rank's values; means are averaged from now on. `warns`: warn once about those without a mean."""
        for name, (value, averaged) in found.items():
            if value is not None:
                own = self._live([name])[name]
                own.copy_(value)
                if averaged:
                    self.shared[name] = own.clone()
        names = [name for name, (value, _) in found.items() if value is None]
        self._reported |= {*names}
        self._agreed = self._digests()
        if names and warns:
            _log.warning(
                "%s differ between ranks and have no mean, since they are not floating-point numbers: each rank"
                " continues with its own. A checkpoint has those of the first rank, and each rank's own next to the"
                " residuals",
                listed(names),
            )

    @torch.no_grad()
    def changes(self) -> list[Tensor]:
        """This rank's value of each buffer minus the shared one, as flat float32. NaN counts as unchanged, so that a
        batch that overflowed does not spoil the other ranks' statistics.
        """
        buffers = self.own
        pairs = [(buffers[name], shared) for name, shared in self.shared.items()]
        return [
            torch.where((own == shared) | own.isnan(), 0.0, own.float() - shared.float()).reshape(-1)
            for own, shared in pairs
        ]

    @torch.no_grad()
    def take_(self, mean_change_N: Tensor, mix: float) -> None:
        """Add the mean of all ranks' `changes` to the shared buffers; this rank's keep a fraction `mix`."""
        at, buffers = 0, self.own
        for name, shared in self.shared.items():
            change = mean_change_N[at : at + shared.numel()].view_as(shared)
            at += shared.numel()
            shared.copy_(torch.where(change == 0.0, shared.float(), shared.float() + change))
            own = buffers[name]
            mixed = torch.where(own.isnan(), shared, torch.lerp(shared, own, mix)) if mix else shared
            own.copy_(torch.where(own == shared, own, mixed))

    def rebase(self) -> None:
        """Make the model's current values, which are the same on all ranks, the shared ones."""
        buffers = self.own
        for name, shared in self.shared.items():
            shared.copy_(buffers[name])
        self._agreed = self._digests()

    @torch.no_grad()
    def use(self, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into the model."""
        for name, own in self._live(values).items():
            own.copy_(values[name])

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        for name, live in self._live(state["shared"]).items():
            self.shared.setdefault(name, live.clone()).copy_(state["shared"][name])
        self.use(state["own"] if own else self.shared)
        if own:
            self._agreed = self._digests()
            self.use(state.get("private", {}))


def _mean(own: Tensor, comm: Comm, device: torch.device, known: Sequence[int]) -> Tensor:
    """The mean in float32 over the ranks `known`."""
    total = own.to(device, torch.float32, copy=True).contiguous()
    if comm.rank not in known:
        total.zero_()
    comm.all_reduce(total).wait()
    return total / len(known)
