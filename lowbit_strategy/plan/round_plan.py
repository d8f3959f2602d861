"""Messages in rounds of several optimizer steps, in which not every step reduces gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.ranks.topology import Topology


class RoundPlan(Protocol):
    """A round as numbers, and the names of its parts in reports.

    A `RoundRule` returns the plan of its first round from `planned()`, and `Rounds` that of the current one from
    `planned(ranks)`.
    """

    @property
    def label(self) -> str:
        """A label for reports: which ranks meet, and when."""

    @property
    def keeps(self) -> str:
        """A label for the memory that is kept from round to round."""

    @property
    def every(self) -> int:
        """Optimizer steps of a round."""

    @property
    def steps_under_way(self) -> int:
        """Optimizer steps of a round during which its messages may travel."""

    def transfers(
        self, methods: Mapping[str, Method], specs: Mapping[str, TensorSpec], topology: Topology
    ) -> tuple[TransferGroup, ...]:
        """The transfers of a round."""

    def kept_nbytes(self, specs: Mapping[str, TensorSpec]) -> int:
        """Bytes of kept memory."""

    def working_nbytes(self, specs: Mapping[str, TensorSpec]) -> int:
        """Temporary bytes of memory in a turn, without messages."""
