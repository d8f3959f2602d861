"""Interfaces of other state that is saved and restored with the engine's residuals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """State that is the same on all ranks: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RankState(Protocol):
    """State of a single rank, saved in the rank's own file: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """Restore the state that ranks have saved.

        Args:
            states: This rank's state, then those of all ranks in order, without parameters of which they have a
                different part. Each is read on demand.
            own: Whether the ranks are unchanged, so that the first state is this rank's whole state.
        """

    def forget(self) -> None:
        """Continue from what all ranks share, because the state is lost."""
