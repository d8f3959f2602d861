"""What an engine knows of others: state that is saved with its own, who reduces in rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from lowbit_strategy.plan.rounds import RoundPlan
from lowbit_strategy.ranks.ranks import Ranks


class Stateful(Protocol):
    """Something else that is saved and restored with the residuals: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RankState(Protocol):
    """State that each rank has for itself, saved in its own file: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        """`own`: it is this rank's own state; if not, of another one of a run on another number of ranks."""

    def forget(self) -> None:
        """The state is lost: go on from what all ranks share."""


class PartState(Protocol):
    """Values of parameters, of each of which a rank has a part or all: nested plain data."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, states: Iterable[Mapping[str, Any]]) -> None:
        """What ranks have saved, this rank's state first, then those of all in rank order: each is read when asked for.
        The layout may be another one.
        """

    def forget(self) -> None:
        """The state is lost: begin again."""


ROUNDS_KEY = "outer"  # where the state of who reduces in rounds is saved, in rounds or not yet


class Rounds(Protocol):
    """Who reduces something in rounds of several steps, while gradients stay on their rank.

    Attributes:
        every: Optimizer steps of each coming round, as a controller chooses; None: as planned.
        stride: Optimizer steps since the reduction before.
        revocable: Whether what is reduced may be rolled back.
    """

    every: int | None
    stride: int
    revocable: ClassVar[bool]

    def planned(self, ranks: Ranks) -> RoundPlan:
        """The current round of the parameters that `ranks` reduce."""

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """What all ranks hold alike, by name."""

    @property
    def drift(self) -> float | None:
        """How far ranks had drifted apart before the last meeting; see `Observation`."""
