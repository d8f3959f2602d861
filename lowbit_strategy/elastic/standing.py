"""The progress of one replica: the synchronizations and samples that count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit_strategy.elastic.agreement import NO_HISTORY, MemberState


class Standing:
    """A replica's progress, which it saves, and reports when members meet (`MemberState`).

    Args:
        num_fragments: Fragments of the model.

    Attributes:
        clock: Number of the last agreement that it has taken part in; 0: none.
        history: Identifies the synchronizations that it has committed.
        group: Digest of the members to which its residuals belong; 0: none.
        is_new: Whether its buffers and frozen parameters have not been compared with the others'.
    """

    def __init__(self, num_fragments: int) -> None:
        self.clock, self.history, self.group = 0, NO_HISTORY, 0
        self.is_new = True
        self._trained = self._counted = 0
        self._marks = [0] * num_fragments  # samples trained at each fragment's last synchronization

    def count_samples(self, number: int) -> None:
        """Count samples before the next optimizer step; if never called, one per step."""
        self._counted += number

    def step(self) -> None:
        """Note that the optimizer has stepped."""
        self._trained += self._counted or 1
        self._counted = 0

    def report(self, place: int, *, prepared: int, digest: int, steps: int, due: bool, position: int) -> MemberState:
        """The state before the synchronization of the fragment at `place`; for the others see `MemberState`."""
        return MemberState(
            clock=self.clock,
            history=self.history,
            prepared=prepared,
            digest=digest,
            steps=steps,
            trained=self._trained - self._marks[place],
            due=int(due),
            group=self.group,
            position=position,
            is_new=int(self.is_new),
        )

    def commit(self, history: int, place: int) -> None:
        """Note that the fragment at `place` is synchronized."""
        self.history = history
        self._marks[place] = self._trained

    def heal(self, history: int) -> None:
        """Note that it has received a different replica's state, with this history."""
        self.history, self.group, self.is_new = history, 0, True
        self._marks = [self._trained] * len(self._marks)

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock, "history": self.history, "trained": self._trained, "marks": self._marks}

    def load_state_dict(self, saved: Mapping[str, Any], *, own: bool) -> None:
        """`own`: whether this replica saved it; otherwise it has trained nothing."""
        self.clock, self.history = saved["clock"], saved["history"]
        if own:
            self._trained, self._marks = saved["trained"], list(saved["marks"])
