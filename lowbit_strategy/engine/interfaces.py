"""What an engine knows of others: state that is saved with its own, and who trains locally."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from lowbit_strategy.methods.outer.rule import OuterRule


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


class SecondMomentCorrection(Protocol):
    """Changes what an optimizer keeps. `exchanges`: ranks send something for it."""

    exchanges: bool

    def correct_(self, optimizer: Optimizer) -> None:
        """It has stepped on what was reduced."""

    def keep(self, names: Sequence[str]) -> None:
        """These parameters are about to be reduced, and the reduction may be rolled back."""

    def roll_back(self, names: Sequence[str]) -> None:
        """It was."""

    def name_parameters(self) -> None:
        """The model has others now."""


class LocalTraining(Protocol):
    """What reports have to know of local steps, and what controllers change.

    Attributes:
        every: Optimizer steps of each coming round in the place of the rule's; None: as the rule has it.
        rule: When replicas synchronize, and how.
    """

    every: int | None
    rule: OuterRule

    @property
    def round_length(self) -> int: ...
    @property
    def drift(self) -> float | None: ...
