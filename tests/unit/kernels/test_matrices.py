"""Orthonormal columns: one by one or all of a shape together, by operations that every device rounds alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit_strategy.kernels.matrices import orthogonalize, orthogonalize_all, product
from testing.worlds.echo import Operations
from testing.worlds.one_tensor import gaussian

ROUNDED_ALIKE = {"add", "add_", "sub", "mul", "div", "sqrt"}  # on every device: IEEE 754 says how
MOVES = {"select", "slice", "unsqueeze", "cat", "stack", "constant_pad_nd", "transpose", "clone", "t", "unbind"}
MOVES |= {"alias", "permute", "new_empty", "empty", "split", "as_strided", "view", "_to_copy", "detach", "copy_"}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_matrices_of_one_shape_are_done_together(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    matrices = [torch.randn(rows, rank, generator=generator) for rows in (40, 64, 40, 40, 64, 7)]
    alone = [orthogonalize(matrix) for matrix in matrices]
    together = orthogonalize_all(matrices)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(other, one)
        torch.testing.assert_close(other.T @ other, torch.eye(rank), rtol=0, atol=1e-5)


def test_the_number_of_operations_does_not_grow_with_that_of_matrices() -> None:
    counts = []
    for repeats in (5, 20):
        with Operations() as operations:
            orthogonalize_all([torch.randn(rows, 4) for rows in (40, 64) * repeats])
        counts.append(sum("unbind" not in name and "randn" not in name for name in operations.names))
    assert counts[0] == counts[1]


def test_nearly_parallel_columns_become_orthonormal() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(500, 1, generator=generator)
    matrix = base + 1e-4 * torch.randn(500, 4, generator=generator)
    q = orthogonalize(matrix)
    torch.testing.assert_close(q.T @ q, torch.eye(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(q @ (q.T @ matrix), matrix, rtol=0, atol=1e-4)
    assert not orthogonalize(torch.zeros(9, 3)).any()


def test_only_operations_that_every_device_rounds_alike() -> None:
    p, q = torch.randn(300, 4), torch.randn(200, 4)
    with Operations() as operations:
        orthogonalize_all([p, q, p])
        product(p, q)
    names = {name.split(".")[1] for name in operations.names}
    assert names <= ROUNDED_ALIKE | MOVES, names - ROUNDED_ALIKE - MOVES


@pytest.mark.parametrize("numel", [1, 2, 3, 1025])
def test_products_in_the_order_that_is_written_down(numel: int) -> None:
    x = torch.randn(numel, 3, generator=torch.Generator().manual_seed(numel))
    y = torch.randn(40_000, 3)
    wanted = np.outer(x[:, 0], y[:, 0]) + np.outer(x[:, 1], y[:, 1])
    wanted = wanted + np.outer(x[:, 2], y[:, 2])
    assert np.array_equal(product(x, y).numpy(), wanted)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1.0, 65536.0])
def test_small_gradients_are_orthonormalized_like_large_ones(rank: int, size: float) -> None:
    """Loss scales and small gradients make no difference."""
    matrix = gaussian((50, rank), 0)
    columns = orthogonalize(matrix * size)
    assert torch.allclose(columns.T @ columns, torch.eye(rank), atol=1e-5)
    assert torch.allclose(columns, orthogonalize(matrix), atol=1e-5)


def test_zeros_stay_zeros() -> None:
    assert not orthogonalize(torch.zeros(50, 2)).any()
