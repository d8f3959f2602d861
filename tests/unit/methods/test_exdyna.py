"""Exclusive partitions: they cover the model once, move with the load, and cope with small models."""

from __future__ import annotations

import pytest

from lowbit_strategy.methods._base.flat_model import make_grid
from lowbit_strategy.methods.exdyna import balanced, equal_sizes, is_unbalanced, repartitioned


@pytest.mark.parametrize("numel", [1, 31, 32, 1000, 32_767, 32_768, 1_000_003, 2**31 + 5])
def test_partitions_cover_every_element_once(numel: int) -> None:
    grid = make_grid(numel)
    assert grid.num_blocks <= 1024
    assert grid.block_numel % 32 == 0
    for world_size in (1, 2, 3, 5, 64):
        sizes = equal_sizes(grid.num_blocks, world_size)
        assert min(sizes) >= 1
        assert len(sizes) == min(world_size, grid.num_blocks)
        assert sum(sizes) == grid.num_blocks
        bounds = grid.bounds(sizes)
        assert bounds[0] == 0
        assert bounds[-1] == numel
        assert bounds == sorted(bounds)


def test_a_block_moves_from_much_to_little() -> None:
    assert balanced([10, 10], [120, 80], 2) == [9, 11]
    assert balanced([10, 10], [80, 120], 2) == [11, 9]
    assert balanced([10, 10], [103, 97], 2) == [10, 10]
    assert balanced([2, 18], [120, 80], 2) == [2, 18]
    assert balanced([10, 10], [0, 0], 2) == [10, 10]


def test_cutting_anew_gives_equal_loads() -> None:
    assert repartitioned([1.0] * 8, 4) == [2, 2, 2, 2]
    assert repartitioned([8, 8, 1, 1, 1, 1, 1, 1, 1, 1], 3) == [1, 1, 8]
    assert repartitioned([0, 0, 0, 0], 4) == [1, 1, 1, 1]
    assert repartitioned([100, 0, 0], 3) == [1, 1, 1]


def test_lopsided_is_more_than_chance() -> None:
    assert not is_unbalanced([10, 14])
    assert is_unbalanced([1000, 1400])
    assert not is_unbalanced([0, 0])
