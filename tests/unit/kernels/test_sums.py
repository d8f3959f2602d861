"""The pass that adds, looks for overflow and selects, against its plain definition."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from lowbit_strategy.kernels import select
from lowbit_strategy.kernels.reference import select as reference
from lowbit_strategy.kernels.select import OverflowedSum, Sum


def _added(x: Tensor, addend: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The definition."""
    assert x.add_(addend).isfinite().all()
    return reference.select_above(x, threshold)


def _pair(numel: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)


@pytest.mark.parametrize("numel", [0, 1, 31, 33, 1000, 1056, 70_000, 200_001])
def test_adding_and_selecting_is_the_definition(path: str, numel: int) -> None:
    for threshold in (0.0, 2.0, math.inf, math.nan):
        x, addend = _pair(numel)
        wanted_x = x.clone()
        wanted_indices, wanted_values = _added(wanted_x, addend, threshold)
        indices, values = select.select_above(x, threshold, expected=numel // 100, addend=addend)
        assert torch.equal(x, wanted_x)
        assert torch.equal(indices, wanted_indices)
        assert torch.equal(values, wanted_values)


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (10, 0), (40, 40), (1056, 8), (70_001, 70), (200_001, 9_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_and_taking_the_largest_is_the_definition(path: str, numel: int, k: int, dtype: torch.dtype) -> None:
    x, addend = _pair(numel)
    x, addend = (8 * x).round() / 8, (4 * addend).round().to(dtype) / 4  # many equal ones
    wanted_x = x + addend
    wanted = reference.top_k(wanted_x, k)
    y = x.clone()
    found = select.top_k(y, k, addend=addend)
    assert torch.equal(y, wanted_x)
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted_x[wanted])
    for at in (0, numel // 2, numel - 1):
        other = addend.clone()
        other[at] = math.nan
        with pytest.raises(OverflowedSum):
            select.top_k(x.clone(), k, addend=other)


@pytest.mark.parametrize(("at", "value"), [(0, 3e38), (40, -3e38), (4095, math.inf), (200_000, math.nan)])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_sum_that_is_not_finite_is_found_anywhere(path: str, threads: int, at: int, value: float) -> None:
    x, addend = _pair(200_001)
    x[at] = addend[at] = value
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(OverflowedSum):
            select.select_above(x.clone(), 3.0, expected=0, addend=addend)
        addend[at] = -value if math.isfinite(value) else 0.0
        x[at] = value if math.isfinite(value) else torch.finfo(torch.float32).max
        select.select_above(x, 3.0, expected=0, addend=addend)
    finally:
        torch.set_num_threads(before)


def test_slices_and_signs_of_zero_are_the_definition(path: str) -> None:
    x, addend = _pair(5003)
    x[7:40], addend[7:30] = -0.0, -0.0
    x[50], addend[50] = 1e-45, -3e-45
    for start in range(5):
        ours, wanted = x[start:].clone(), x[start:].clone()
        found = select.select_above(ours, 1e-44, expected=9, addend=addend[start:])
        expected = _added(wanted, addend[start:], 1e-44)
        assert torch.equal(ours.view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_other_dtypes_are_added_too(path: str) -> None:
    x, addend = _pair(9_000)
    wanted = x + addend.bfloat16()
    indices, values = select.select_above(x, 2.5, expected=0, addend=addend.bfloat16())
    assert torch.equal(x, wanted)
    assert torch.equal(indices, reference.select_above(wanted, 2.5)[0])
    assert torch.equal(values, reference.select_above(wanted, 2.5)[1])


@pytest.mark.parametrize(("numel", "num"), [(2, 1), (101, 10), (1000, 1000), (70_001, 4096)])
def test_a_sample_of_the_sum_is_one_of_what_is_formed(path: str, numel: int, num: int) -> None:
    x, addend = _pair(numel)
    sample = Sum(x, addend).sample(num, seed=3)
    assert torch.equal(sample, Sum(x + addend).sample(num, seed=3))
    half = addend.bfloat16()
    assert torch.equal(Sum(x, half).sample(num, seed=3), Sum(x + half).sample(num, seed=3))


def test_a_sum_is_formed_once() -> None:
    x, addend = _pair(50_000)
    wanted = x + addend
    total = Sum(x, addend)
    first = total.above(4.0, expected=10)
    second = total.above(3.0, expected=10)
    assert torch.equal(total.formed(), wanted)
    assert torch.equal(first[0], reference.select_above(wanted, 4.0)[0])
    assert torch.equal(second[0], reference.select_above(wanted, 3.0)[0])


@pytest.mark.parametrize(
    ("numel", "k"),
    [
        (1, 1),
        (1000, 10),
        (100_000, 100),
        (3_000_000, 3000),
        pytest.param(3_000_000, 600_000, marks=pytest.mark.slow),
    ],
)
def test_top_k_of_a_sum_is_the_definition(path: str, numel: int, k: int) -> None:
    x, addend = _pair(numel)
    for sparse in (False, True):
        ours, addend = x.clone(), addend * (torch.arange(numel) % 7 == 0) if sparse else addend
        wanted = ours + addend
        indices, values = Sum(ours, addend).top_k(k)
        assert torch.equal(ours, wanted)
        assert torch.equal(indices, _largest_of_sum(numel, k, sparse=sparse))
        assert torch.equal(values, wanted[indices])


@functools.lru_cache  # sorting millions of numbers takes seconds: once for all paths
def _largest_of_sum(numel: int, k: int, *, sparse: bool) -> Tensor:
    x, addend = _pair(numel)
    return reference.top_k(x + addend * (torch.arange(numel) % 7 == 0) if sparse else x + addend, k)


@pytest.mark.parametrize("numel", [1000, 3_000_000])
def test_top_k_of_a_sum_that_overflows_raises(path: str, numel: int) -> None:
    x, addend = _pair(numel)
    x[numel // 2] = addend[numel // 2] = 3e38
    with pytest.raises(OverflowedSum):
        Sum(x, addend).top_k(numel // 1000)


def test_top_k_of_a_sum_of_nearly_nothing_but_zeros() -> None:
    x, addend = torch.zeros(3_000_000), torch.zeros(3_000_000)
    addend[[5, 2_000_000]] = 1.0
    indices, values = Sum(x, addend).top_k(4)
    assert indices.tolist() == [0, 1, 5, 2_000_000]
    assert values.tolist() == [0.0, 0.0, 1.0, 1.0]
