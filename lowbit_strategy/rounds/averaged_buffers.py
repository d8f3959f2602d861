"""Buffers of a model whose ranks train by themselves: those of floating point, such as BatchNorm's, are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class AveragedBuffers:
    """Each rank's own buffers, and what all ranks share of them.

    What travels is how a buffer has changed since the last average: a buffer that never changes, such as a mask with
    infinite entries, stays as it is to the bit.

    Args:
        buffers: Gives them by name, the same on all ranks; integer ones are left alone. Asked whenever they are
            needed: a model may replace its buffers by other tensors.
    """

    def __init__(self, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        self._buffers = buffers
        self._shared = {name: buffer.detach().clone() for name, buffer in self._own.items()}
        self._aside: dict[str, Tensor] | None = None

    @property
    def _own(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers().items() if buffer.is_floating_point()}

    @torch.no_grad()
    def changes(self) -> list[Tensor]:
        """float32, flat, for each buffer: this rank's minus the shared one. What has become NaN here counts as
        unchanged: the others' statistics must not suffer from a batch that overflowed.
        """
        return [
            torch.where((own == shared) | own.isnan(), 0.0, own.float() - shared.float()).reshape(-1)
            for own, shared in self._pairs()
        ]

    @torch.no_grad()
    def take_(self, mean_change_N: Tensor, mix: float) -> None:
        """The shared buffers move by the mean of what `changes` gave on all ranks; the own ones follow."""
        at, buffers = 0, self._own
        for name, shared in self._shared.items():
            change = mean_change_N[at : at + shared.numel()].view_as(shared)
            at += shared.numel()
            shared.copy_(torch.where(change == 0.0, shared.float(), shared.float() + change))
            own = buffers[name]
            mixed = torch.where(own.isnan(), shared, torch.lerp(shared, own, mix)) if mix else shared
            own.copy_(torch.where(own == shared, own, mixed))

    @torch.no_grad()
    def use_shared(self) -> None:
        """This rank goes on with what all ranks share."""
        self._copy(self._shared)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(own, self._shared[name]) for name, own in self._own.items() if name in self._shared]

    def rebase(self) -> None:
        buffers = self._own
        for name, shared in self._shared.items():
            shared.copy_(buffers[name])

    def use_averages(self) -> None:
        self._aside = {name: own.clone() for name, own in self._own.items()}
        self._copy(self._shared)

    def use_own(self) -> None:
        if self._aside is not None:
            self._copy(self._aside)
            self._aside = None

    def keep(self) -> None:
        """What the model has is what this rank goes on with."""
        self._aside = None

    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, own in self._own.items():
            if name in values:
                own.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        return {"shared": self._shared, "own": self._own if self._aside is None else self._aside}

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        for name, shared in self._shared.items():
            if name in state["shared"]:
                shared.copy_(state["shared"][name])
        self._copy(state["own"] if own else self._shared)
