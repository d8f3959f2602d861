"""PowerSGD's orthonormalisation."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods.low_rank.orthogonal import orthogonalize
from tests.worlds.one_tensor import gaussian


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1.0, 65536.0])
def test_small_gradients_are_orthonormalised_like_large_ones(rank: int, size: float) -> None:
    """Loss scales and small gradients make no difference."""
    matrix = gaussian((50, rank), 0)
    columns = orthogonalize(matrix * size, epsilon=1e-8)
    assert torch.allclose(columns.T @ columns, torch.eye(rank), atol=1e-5)
    assert torch.allclose(columns, orthogonalize(matrix, epsilon=1e-8), atol=1e-5)


def test_zeros_stay_zeros() -> None:
    assert not orthogonalize(torch.zeros(50, 2), epsilon=1e-8).any()
    assert not orthogonalize(torch.zeros(50, 2), epsilon=0.0).any()
