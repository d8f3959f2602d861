"""Cuts parameters into fragments and buckets."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.collectives.layout import TensorSpec

BUCKET_NUMEL = 2**21  # elements of a bucket, coded while the previous bucket travels


def cut_into(specs: Sequence[TensorSpec], num_fragments: int) -> list[list[TensorSpec]]:
    """Cut consecutive parameters into at most `num_fragments` parts of about equal size, none of them empty."""
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
