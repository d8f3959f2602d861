"""Interfaces between the engine and its users: state that is saved with the engine's, and reducing in rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

from torch import Tensor


class Stateful(Protocol):
    """Other state that is saved and restored with the residuals: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RankState(Protocol):
    """State of a single rank, saved in the rank's own file: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """What ranks have saved: this rank's state first, then those of all in rank order, without parameters of which
        they have another part. Each is read when asked for.

        Args:
            states: They.
            own: The ranks are what they were, so the first state is all of this rank's.
        """

    def forget(self) -> None:
        """The state is lost: continue from what all ranks share."""


class Tally:
    """State that follows reductions. The methods here do nothing; subclasses override those that they need."""

    def keep(self, names: Collection[str]) -> None:
        """These parameters are about to be reduced, and the reduction may be rolled back."""

    def commit(self, names: Collection[str]) -> None:
        """The open reductions of these parameters have been used."""

    def roll_back(self, names: Collection[str]) -> None:
        """The open reductions of these parameters are thrown away."""

    def set_aside(self, names: Collection[str]) -> None:
        """The gradients of these parameters were cleared; what becomes of their reductions is decided later."""
        self.roll_back(names)

    def settle(self, names: Collection[str], *, used: bool) -> None:
        """It is now known whether the reductions that were set aside were `used`."""

    def taken_back(self, names: Collection[str]) -> AbstractContextManager[None]:
        """A context, for checkpoints, in which these parameters' state is as before their reductions."""
        return nullcontext()


class Rounds(Protocol):
    """Reduces something in rounds of several steps, while gradients stay on their rank.

    Attributes:
        every: Optimizer steps of each coming round, chosen by a controller; None: as planned.
        revocable: Whether what is reduced may be rolled back.
    """

    every: int | None
    revocable: ClassVar[bool]

    @property
    def stride(self) -> int:
        """Optimizer steps since the previous reduction."""

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """What is the same on all ranks, by name."""

    @property
    def drift(self) -> float | None:
        """How far the ranks had drifted apart before they last met; see `Observation`."""
