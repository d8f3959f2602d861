"""Exchanges and memory in addition to those of gradients, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology


class Extra:
    """Exchanges and memory for a purpose other than gradients. This base class has none.

    A `Follower` of gradients returns it as `extra`, and a `Part` before there is an engine (`WithExtra`).

    Attributes:
        purpose: The purpose of the memory, in a few words.
        given_up: A description of a run without it and of the cost; None: it cannot be given up.
    """

    purpose: str = ""
    given_up: tuple[str, str] | None = None

    def transfers(
        self,
        reduced: Sequence[ParamGroup],
        assignments: Mapping[str, Assignment],
        specs: Mapping[str, TensorSpec],
        topology: Topology,
    ) -> tuple[TransferGroup, ...]:
        """The transfers of a step, on average."""
        return ()

    def kept_nbytes(
        self,
        assignments: Mapping[str, Assignment],
        specs: Mapping[str, TensorSpec],
        topology: Topology,
        *,
        copies: bool,
    ) -> int:
        """Bytes of kept memory. `copies`: whether it is copied before a step changes it."""
        return 0

    def lines(self, plan: Any) -> list[str]:
        """Lines of the start-up report, for a `StepPlan`."""
        return []
