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

    Attributes:
        shared: By name.
    """

    def __init__(self, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        self._buffers = buffers
        self.shared = {name: buffer.detach().clone() for name, buffer in self.own.items()}

    @property
    def own(self) -> dict[str, Tensor]:
        """What the model has at present, live."""
        return {name: buffer for name, buffer in self._buffers().items() if buffer.is_floating_point()}

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
        buffers = self.own
        for name, shared in self.shared.items():
            shared.copy_(buffers[name])

    @torch.no_grad()
    def use(self, values: Mapping[str, Tensor]) -> None:
        """Put these, as far as there are any, into the model."""
        for name, own in self.own.items():
            if name in values:
                own.copy_(values[name])

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        for name, shared in self.shared.items():
            if name in state["shared"]:
                shared.copy_(state["shared"][name])
        self.use(state["own"] if own else self.shared)
