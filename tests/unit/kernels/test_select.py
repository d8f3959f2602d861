"""Selection by magnitude against its plain definition."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor

from lowbit_strategy.kernels import select
from lowbit_strategy.kernels.reference import select as reference
from lowbit_strategy.kernels.reference.rng import sample_positions


def _values(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000, 70_000, 200_001])
def test_select_above_is_the_definition(path: str, numel: int) -> None:
    x = _values(numel)
    for threshold in (0.0, 0.5, 3.0, 100.0, math.inf):
        indices, values = select.select_above(x, threshold)
        wanted_indices, wanted_values = reference.select_above(x, threshold)
        assert indices.dtype == torch.int32
        assert torch.equal(indices, wanted_indices)
        assert torch.equal(values, wanted_values)


def test_select_above_looks_at_unaligned_slices_and_special_values(path: str) -> None:
    x = _values(5003)
    x[10], x[700], x[701], x[702] = math.nan, math.inf, -math.inf, -0.0
    for start in range(5):
        piece = x[start:]
        indices, values = select.select_above(piece, 2.0)
        wanted_indices, wanted_values = reference.select_above(piece, 2.0)
        assert torch.equal(indices, wanted_indices)
        assert torch.equal(values, wanted_values)
    assert not select.select_above(x, math.nan)[0].numel()


def test_select_above_makes_room_for_more_than_expected(path: str) -> None:
    x = _values(100_000)
    indices, values = select.select_above(x, 0.0, expected=3)
    assert torch.equal(indices, torch.arange(100_000, dtype=torch.int32))
    assert torch.equal(values, x)


def test_select_above_is_the_same_with_more_threads(path: str) -> None:
    x = _values(300_000)
    alone = select.select_above(x, 1.0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = select.select_above(x, 1.0)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


def test_selection_refuses_other_tensors() -> None:
    with pytest.raises(TypeError, match="float32"):
        select.select_above(torch.zeros(4, dtype=torch.float64), 1.0)
    with pytest.raises(TypeError, match="contiguous"):
        select.top_k(torch.zeros(8)[::2], 1)


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (10, 0), (10, 10), (1000, 7), (70_001, 70), (600_000, 6_000)])
def test_top_k_is_the_definition(path: str, numel: int, k: int) -> None:
    x = _values(numel)
    indices, values = select.top_k(x, k)
    wanted = reference.top_k(x, k)
    assert torch.equal(indices, wanted)
    assert torch.equal(values, x[wanted])


@pytest.mark.parametrize("numel", [900, 600_000])
def test_top_k_takes_the_first_of_equal_ones(path: str, numel: int) -> None:
    x = (_values(numel) * 2).round()
    for k in (5, numel // 200, numel // 3):
        assert torch.equal(select.top_k(x, k)[0], reference.top_k(x, k))
    assert torch.equal(select.top_k(torch.zeros(numel), 3)[0], torch.arange(3))


def test_top_k_of_a_few_large_ones_among_zeros() -> None:
    x = torch.zeros(600_000)
    x[123_456], x[599_999] = 3.0, -4.0
    indices, values = select.top_k(x, 3)
    assert indices.tolist() == [0, 123_456, 599_999]
    assert values.tolist() == [0.0, 3.0, -4.0]


@pytest.mark.parametrize("numel", [2000, 600_000])
def test_top_k_where_few_are_not_zero_is_the_definition(path: str, numel: int) -> None:
    """An embedding of which a step touched some rows."""
    x = torch.zeros(numel)
    x[100:180] = _values(80)
    x[numel - 50 :] = _values(50, 1)
    x[7] = -0.0
    for k in (5, 60, 200, numel // 4):
        indices, values = select.top_k(x, k)
        assert torch.equal(indices, reference.top_k(x, k))
        assert torch.equal(values, x[indices])
    x[numel // 2] = 1e-42  # below the normal range, but not zero
    for k in (60, 200):
        assert torch.equal(select.top_k(x, k)[0], reference.top_k(x, k))


def test_top_k_does_not_sort_a_tensor_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3_000_000)
    x[1_000:1_500] = _values(500)
    sizes = []
    topk = Tensor.topk
    monkeypatch.setattr(Tensor, "topk", lambda self, *a, **k: sizes.append(self.numel()) or topk(self, *a, **k))
    for k in (400, 3_000):
        select.top_k(x, k)
    assert max(sizes) < x.numel() // 4


def test_top_k_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="only 3"):
        select.top_k(torch.zeros(3), 4)


@pytest.mark.parametrize(("numel", "num"), [(100, 100), (101, 10), (70_001, 4096)])
def test_samples_are_one_from_each_stratum(numel: int, num: int) -> None:
    positions = sample_positions(numel, num, 5, torch.device("cpu"))
    edges = torch.arange(num + 1) * numel // num
    assert (positions >= edges[:-1]).all()
    assert (positions < edges[1:]).all()
    if num < numel:
        assert not torch.equal(positions, sample_positions(numel, num, 6, torch.device("cpu")))


def test_a_threshold_of_a_sample_is_near_the_quantile() -> None:
    x = _values(1_000_000)
    sample = select.sample_magnitudes(x, 200_000, seed=1)
    for density in (0.5, 0.01, 0.001):
        threshold = select.largest_threshold(sample, round(density * sample.numel()))
        assert int((x.abs() >= threshold).sum()) == pytest.approx(density * x.numel(), rel=0.2)
    assert select.largest_threshold(torch.zeros(0), 1) == math.inf


@pytest.mark.parametrize(("numel", "num"), [(2, 1), (100, 99), (101, 10), (70_001, 4096), (65_536, 1024)])
def test_samples_are_the_references(path: str, numel: int, num: int) -> None:
    x = _values(numel)
    for seed in (0, 5, 2**32 - 1):
        places = sample_positions(numel, num, seed, torch.device("cpu"))
        assert torch.equal(select.sample_magnitudes(x, num, seed=seed), x[places].abs())


def test_nothing_of_a_selection_waits_for_the_garbage_collector(path: str) -> None:
    x, addend = _values(200_001), _values(200_001, seed=1)
    gone = [weakref.ref(x), weakref.ref(addend)]
    gc.disable()
    try:
        select.select_above(x, 1.0, addend=addend)
        del x, addend
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
