"""The ranks' mean loss, round by round: what the length of rounds may follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RoundLosses:
    """This rank's losses since its last turn, and what all ranks know of the first turn's and the last one's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """A new run."""
        self._own: list[Tensor] = []
        self._first: float | None = None
        self._last: float | None = None

    def observe(self, loss: Tensor | float) -> None:
        """Of a batch. Does not wait for the device."""
        self._own.append(torch.as_tensor(loss, device=self._device).detach().float().mean())

    def take(self) -> Tensor | None:
        """This rank's mean since it was last asked; None: not known."""
        own, self._own = self._own, []
        return torch.stack(own).mean() if own else None

    def arrived(self, loss: float | None) -> None:
        """The mean over all ranks of what they took in a turn; None: not known."""
        if loss is not None:
            self._first, self._last = loss if self._first is None else self._first, loss

    @property
    def progress(self) -> float | None:
        """The last turn's over the first one's; None: not known."""
        return None if not self._first or self._last is None else self._last / self._first

    def state_dict(self) -> dict[str, Any]:
        return {"own": list(self._own), "means": [self._first, self._last]}

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        """`own`: it is this rank's own state, and not another's."""
        self._first, self._last = state["means"]
        self._own = [each.to(self._device) for each in state["own"]] if own else []
