"""The digest of a tensor: the same for the same bits, another for others, whatever the type and memory order."""

from __future__ import annotations

import random

import pytest
import torch

from lowbit_strategy.kernels import digest as definition
from lowbit_strategy.kernels.digest import digests

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int32)


def digest(x: torch.Tensor) -> int:
    found = digests([x], torch.device("cpu"))
    assert found.tolist() == [int(definition.digest(x))]
    return int(found)


def _bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_type_and_shape(path: str, dtype: torch.dtype) -> None:
    for shape in ((), (1,), (7,), (0,), (33, 5), (300_007,)):
        x = _bits(shape, dtype)
        assert digest(x) == digest(x.clone())
        if x.numel():
            other = x.clone().view(-1)
            other[-1] = 1 - int(other[-1])
            assert digest(other) != digest(x)


def test_every_single_bit_counts(path: str) -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    expected, chosen = digest(x), random.Random(0)
    for _ in range(300):
        other, bit = x.clone(), chosen.randrange(32 * x.numel())
        other.view(torch.int32)[bit // 32] ^= 1 << bit % 32 if bit % 32 < 31 else -(1 << 31)
        assert digest(other) != expected


def test_exchanged_elements_and_opposite_changes_are_noticed(path: str) -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (600_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    swapped, shifted = x.clone(), x.clone()
    swapped[[3, 500_003]] = x[[500_003, 3]]
    shifted[10] += 1
    shifted[12] -= 1
    halves = torch.cat([x[300_000:], x[:300_000]])
    assert len({int(digest(each)) for each in (x, swapped, shifted, halves)}) == 4


def test_negative_zero_and_nan_are_bits_like_others() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_memory_order_and_alignment_do_not_matter(path: str) -> None:
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    assert digest(x.to(memory_format=torch.channels_last)) == digest(x)
    half = torch.randn(41, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert digest(half[1:]) == digest(half[1:].clone())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(path: str, threads: int) -> None:
    x = torch.randn(5 * 2**18 + 3, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert digest(x) == int(definition.digest(x))
    finally:
        torch.set_num_threads(before)


def test_several_at_once_are_each_on_its_own(path: str) -> None:
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 5, 400_000)]
    assert digests(parts, torch.device("cpu")).tolist() == [digest(part) for part in parts]
