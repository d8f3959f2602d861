"""Interfaces between the engine and its users: state that is saved with the engine's, and reducing in rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
