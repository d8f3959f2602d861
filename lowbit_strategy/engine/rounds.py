"""The interface through which the engine reduces something other than gradients, in rounds of several steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from torch import Tensor


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
        """The values that are the same on all ranks, by name."""

    @property
    def drift(self) -> float | None:
        """How far the ranks had drifted apart before they last met; see `Observation`."""
