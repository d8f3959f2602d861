"""Merging sparse vectors: nothing is lost, the largest stay."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.methods.zoo.gtopk import GTopK, merge


def _chosen(indices: list[int], values: list[float]) -> Chosen:
    return Chosen(torch.tensor(indices), torch.tensor(values))


def test_the_largest_of_the_sum_stay() -> None:
    kept, dropped = merge(_chosen([1, 4, 9], [3.0, -1.0, 2.0]), _chosen([0, 4, 9], [0.25, -4.0, -2.5]), 3)
    assert kept.indices.tolist() == [1, 4, 9]
    assert kept.values.tolist() == [3.0, -5.0, -0.5]
    assert dropped.indices.tolist() == [0]
    assert dropped.values.tolist() == [0.25]


def test_a_merge_with_itself_doubles() -> None:
    a = _chosen([2, 3], [1.0, -2.0])
    kept, dropped = merge(a, a, 2)
    assert kept.values.tolist() == [2.0, -4.0]
    assert not dropped.indices.numel()


def test_nan_is_never_dropped() -> None:
    kept, _ = merge(_chosen([0, 1], [torch.nan, torch.nan]), _chosen([5, 6], [1e30, 2e30]), 2)
    assert kept.indices.tolist() == [0, 1]
    assert kept.values.isnan().all()


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="density must be in"):
        GTopK(density=2.0)
