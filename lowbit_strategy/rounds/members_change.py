"""Who has come and who is lost among replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MembersChange:
    """The replicas of a turn are others than those of the turn before.

    Args:
        step: Optimizer steps completed before.
        members: The names of all, in the order of ranks.
        joined: Of these, who was not there before. Of the first turn: all.
        lost: Who was, and is not any more.
        seconds: From the end of a round, or from the beginning, until all that are left had met and were the same.
    """

    step: int
    members: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        changes = [
            f"{what}: {', '.join(names)}" for what, names in (("joined", self.joined), ("lost", self.lost)) if names
        ]
        return (
            f"optimizer step {self.step}: {len(self.members)} replicas ({', '.join(self.members)});"
            f" {'; '.join(changes) or 'in another order'}; met in {self.seconds:.1f} s"
        )
