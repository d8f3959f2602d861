"""Orthonormal columns: the same as one by one, in one call per shape."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods.low_rank.orthogonal import orthogonalize, orthogonalize_all
from tests.worlds.echo import Operations


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_matrices_of_one_shape_are_done_together(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    matrices = [torch.randn(rows, rank, generator=generator) for rows in (40, 64, 40, 40, 64, 7)]
    alone = [orthogonalize(matrix, 1e-8) for matrix in matrices]
    together = orthogonalize_all(matrices, 1e-8)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other.T @ other, torch.eye(rank), rtol=0, atol=1e-5)


def test_a_model_takes_one_decomposition_per_shape() -> None:
    matrices = [torch.randn(rows, 4) for rows in (40, 64) * 20]
    with Operations() as operations:
        orthogonalize_all(matrices, 1e-8)
    assert sum("linalg_qr" in name for name in operations.names) == 2
