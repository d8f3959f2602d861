"""The note in a run's record when its members have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChange:
    """A change of members since the previous synchronization.

    Args:
        step: Optimizer steps completed before.
        members: The names of all members, in rank order.
        joined: The new members; at first all.
        lost: The members that are gone.
        seconds: Seconds from the end of a round, or the start, until all remaining members had met and had the same
            state.
    """

    step: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    seconds: float

    @classmethod
    def between(cls, before: Sequence[str], now: Sequence[str], *, step: int, seconds: float) -> MembersChange:
        """The change from the members `before` to those `now`."""
        joined = tuple(name for name in now if name not in before)
        lost = tuple(name for name in before if name not in now)
        return cls(step=step, members=tuple(now), joined=joined, lost=lost, seconds=seconds)

    def __str__(self) -> str:
        changes = [
            f"{what}: {', '.join(names)}" for what, names in (("joined", self.joined), ("lost", self.lost)) if names
        ]
        return (
            f"optimizer step {self.step}: {len(self.members)} replicas ({', '.join(self.members)});"
            f" {'; '.join(changes) or 'in another order'}; met in {self.seconds:.1f} s"
        )
