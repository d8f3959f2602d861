"""Decides which fragment's turn it is to synchronize, and how long a round is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.local_steps.rule import OuterRule


class Turns:
    """Fragments take turns, spread evenly over a round. Each round may have a different length.

    Attributes:
        place: The fragment whose turn is next.
        since: Optimizer steps since the last turn.
        stride: Optimizer steps between the last two turns.
        round_length: Optimizer steps of the current round.
        losses: The losses from which a rule may choose the next length.
    """

    def __init__(self, rule: OuterRule, num_fragments: int, device: torch.device, step_index: int) -> None:
        self._rule, self._num = rule, num_fragments
        self.place = self.since = 0
        self.stride = 1
        self.round_length = rule.round_length(step_index, None)
        self._rates: tuple[float | None, float | None] = (None, None)  # learning rates of the last two steps
        self.losses = RoundLosses(device)

    @property
    def is_last(self) -> bool:
        """Whether the next turn ends the round."""
        return self.place == self._num - 1

    @property
    def interval(self) -> int:
        """Optimizer steps from the last turn to the next."""
        return -(-(self.place + 1) * self.round_length // self._num) - -(-self.place * self.round_length // self._num)

    @property
    def moment(self) -> tuple[int, int, int]:
        """The current state, for `go_back`."""
        return self.place, self.since, self.round_length

    def go_back(self, moment: tuple[int, int, int]) -> None:
        """Undo the turn that was taken in that state."""
        self.place, self.since, self.round_length = moment

    def step(self, learning_rate: float | None) -> None:
        """Note that the inner optimizer has stepped with this learning rate."""
        self.since += 1
        self._rates = (self._rates[1], learning_rate)

    def begin(self) -> int:
        """Begin a turn, and return the fragment's place."""
        self.stride = max(1, self.since)
        return self.place

    def advance(self, step_index: int, every: int | None) -> None:
        """Advance to the next fragment. `every`: steps of the coming round; None: the rule decides."""
        self.place, self.since = (self.place + 1) % self._num, 0
        if self.place == 0:
            earlier, last = self._rates
            rising = earlier is not None and last is not None and last > earlier
            chosen = every or self._rule.round_length(step_index, last, rising=rising, progress=self.losses.progress)
            self.round_length = max(chosen, self._num)

    def restart(self, step_index: int) -> None:
        """Start a new run."""
        self.begin_round()
        self.losses.restart()
        self.round_length = self._rule.round_length(step_index, None)

    def begin_round(self) -> None:
        """Begin a round with the next turn."""
        self.since = self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "every": self.round_length,
            "turn": self.place,
            "since": self.since,
            "rates": list(self._rates),
            "losses": self.losses.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the round at the turn at which it was saved, on any rank: `since` and losses are each rank's own."""
        self.round_length, self.place = state["every"], state["turn"] % self._num
        earlier, last = state["rates"]
        self._rates = (earlier, last)


class RoundLosses:
    """This rank's losses since its last synchronization, and the ranks' mean loss at the first and at the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Start a new run."""
        self._own: list[Tensor] = []
        self._first: float | None = None
        self._last: float | None = None

    def observe(self, loss: Tensor | float) -> None:
        """Record a batch's loss. Does not wait for the device."""
        self._own.append(torch.as_tensor(loss, device=self._device).detach().float().mean())

    def take(self) -> Tensor | None:
        """This rank's mean loss since the last call; None: unknown."""
        own, self._own = self._own, []
        return torch.stack(own).mean() if own else None

    def arrived(self, loss: float | None) -> None:
        """Note the mean loss over all ranks; None: unknown."""
        if loss is not None:
            self._first, self._last = loss if self._first is None else self._first, loss

    @property
    def progress(self) -> float | None:
        """The last mean over the first one; None: unknown."""
        return None if not self._first or self._last is None else self._last / self._first

    def state_dict(self) -> dict[str, Any]:
        return {"own": list(self._own), "means": [self._first, self._last]}

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        """`own`: whether this rank saved it."""
        self._first, self._last = state["means"]
        self._own = [each.to(self._device) for each in state["own"]] if own else []
