"""Interfaces of other state that is saved and restored with the engine's residuals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Saved(Protocol):
    """State that is saved: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...


class Stateful(Saved, Protocol):
    """State that is the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RankState(Saved, Protocol):
    """State of a single rank, saved in the rank's own file."""

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """What ranks have saved: this rank's state first, then those of all in rank order, without parameters of which
        they have another part. Each is read when asked for.

        Args:
            states: They.
            own: The ranks are what they were, so the first state is all of this rank's.
        """

    def forget(self) -> None:
        """The state is lost: continue from what all ranks share."""
