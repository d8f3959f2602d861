"""The messages and memory of local steps, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.local_steps.cutting import buckets_of, cut_into
from lowbit_strategy.local_steps.header import NUM_FACTS, SAMPLE_NUMEL
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.plan.gradients import peer_transfer, summed
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.ranks.topology import Topology


@dataclass(frozen=True, slots=True)
class LocalRoundPlan:
    """A round of local steps.

    Args:
        label: The rule's label.
        every: Optimizer steps of the round.
        fragments: Parts of the model that take turns.
        steps_under_way: Optimizer steps during which the messages of all fragments may travel.
        moment_nbytes: Bytes of the outer optimizer's state per element.
        eager: Whether a rank immediately applies its own part of what it has sent.
        has_header: Whether a fragment's header is sent with these parameters.
    """

    keeps: ClassVar[str] = "anchors and pseudo-gradients"

    label: str
    every: int
    fragments: int
    steps_under_way: int
    moment_nbytes: float
    eager: bool
    has_header: bool = True

    def transfers(
        self, methods: Mapping[str, Method], specs: Mapping[str, TensorSpec], topology: Topology
    ) -> tuple[TransferGroup, ...]:
        """The transfers of a round. Averaged buffers such as BatchNorm's travel with a header and are not counted."""
        transfers = []
        for at, fragment in enumerate(self._fragments(specs)):
            sampled = min(SAMPLE_NUMEL, sum(spec.numel for spec in fragment))
            for number, bucket in enumerate(buckets_of(fragment)):
                transfer = peer_transfer(f"fragment {at}, bucket {number}", bucket, methods, topology)
                if number == 0 and self.has_header:
                    header = summed("header", NUM_FACTS + topology.num_peers + sampled, topology)
                    transfer = replace(transfer, messages=(header, *transfer.messages))
                transfers.append(transfer)
        return tuple(transfers)

    def kept_nbytes(self, specs: Mapping[str, TensorSpec]) -> int:
        """Memory for anchors, the outer optimizer's state once it has stepped, and a pseudo-gradient."""
        numel = sum(spec.numel for spec in specs.values())
        return round(numel * (4 + self.moment_nbytes)) + self._largest_fragment_nbytes(specs)

    def working_nbytes(self, specs: Mapping[str, TensorSpec]) -> int:
        """Memory for this rank's part of the mean, if it is applied before the others arrive."""
        return self._largest_fragment_nbytes(specs) if self.eager else 0

    def _fragments(self, specs: Mapping[str, TensorSpec]) -> list[list[TensorSpec]]:
        return cut_into(list(specs.values()), self.fragments)

    def _largest_fragment_nbytes(self, specs: Mapping[str, TensorSpec]) -> int:
        return 4 * max((sum(spec.numel for spec in fragment) for fragment in self._fragments(specs)), default=0)
