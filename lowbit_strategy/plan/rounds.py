"""What travels in a round of local steps: fragments take turns, each in buckets, with a header before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.plan.gradients import peer_transfer, summed
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.ranks.topology import Topology

SAMPLE_NUMEL = 256  # elements from which the drift of ranks is measured
BUCKET_NUMEL = 2**21  # elements that are coded while those before them travel
NUM_FACTS = 5  # numbers of a header beside the sample and one per rank


def cut_into(specs: Sequence[TensorSpec], num_fragments: int) -> list[list[TensorSpec]]:
    """Consecutive parameters in parts of about equal size, at most `num_fragments`; none is empty."""
    total = sum(spec.numel for spec in specs)
    parts: list[list[TensorSpec]] = [[] for _ in range(num_fragments)]
    before = 0
    for spec in specs:
        middle = before + spec.numel / 2
        parts[min(num_fragments - 1, int(middle * num_fragments / max(total, 1)))].append(spec)
        before += spec.numel
    return [part for part in parts if part]


def buckets_of(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Consecutive parameters of at most `BUCKET_NUMEL` elements together, or a larger one alone."""
    buckets: list[list[TensorSpec]] = [[]]
    numel = 0
    for spec in specs:
        if any(each.numel for each in buckets[-1]) and numel + spec.numel > BUCKET_NUMEL:
            buckets.append([])
            numel = 0
        buckets[-1].append(spec)
        numel += spec.numel
    return buckets


def round_transfers(
    rule: OuterRule, methods: Mapping[str, Method], specs: Mapping[str, TensorSpec], topology: Topology
) -> tuple[TransferGroup, ...]:
    """A round's buckets. Averaged buffers of a model, such as BatchNorm's, travel with a header: not counted here."""
    transfers = []
    for at, fragment in enumerate(cut_into(list(specs.values()), rule.fragments)):
        sampled = min(SAMPLE_NUMEL, sum(spec.numel for spec in fragment))
        for number, bucket in enumerate(buckets_of(fragment)):
            transfer = peer_transfer(f"fragment {at}, bucket {number}", bucket, methods, topology)
            if number == 0:
                header = summed("header", NUM_FACTS + topology.num_peers + sampled, topology)
                transfer = replace(transfer, messages=(header, *transfer.messages))
            transfers.append(transfer)
    return tuple(transfers)


def anchor_nbytes(rule: OuterRule, specs: Mapping[str, TensorSpec]) -> int:
    """Memory for anchors, for what the outer optimizer keeps once it has stepped, and for a pseudo-gradient."""
    numel = sum(spec.numel for spec in specs.values())
    return round(numel * (4 + rule.moment_nbytes)) + _largest_fragment_nbytes(rule, specs)


def share_nbytes(rule: OuterRule, specs: Mapping[str, TensorSpec]) -> int:
    """Temporary memory of a turn: this rank's own share of the mean, where it does not wait for the others'."""
    return _largest_fragment_nbytes(rule, specs) if rule.eager else 0


def _largest_fragment_nbytes(rule: OuterRule, specs: Mapping[str, TensorSpec]) -> int:
    fragments = cut_into(list(specs.values()), rule.fragments)
    return 4 * max((sum(spec.numel for spec in fragment) for fragment in fragments), default=0)
