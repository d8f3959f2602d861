"""The digest of a tensor: the same for the same bits, another for others, whatever the type and memory order."""

from __future__ import annotations

import random

import pytest
import torch

from lowbit_strategy.hooks.digest import digest, is_due

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int32)


def _bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (33, 5), (300_007,)])
def test_any_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = _bits(shape, dtype)
    assert digest(x) == digest(x.clone())
    if x.numel():
        other = x.clone().view(-1)
        other[-1] = 1 - int(other[-1])
        assert digest(other) != digest(x)


def test_every_single_bit_counts() -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    expected, chosen = digest(x), random.Random(0)
    for _ in range(300):
        other, bit = x.clone(), chosen.randrange(32 * x.numel())
        other.view(torch.int32)[bit // 32] ^= 1 << bit % 32 if bit % 32 < 31 else -(1 << 31)
        assert digest(other) != expected


def test_exchanged_elements_and_opposite_changes_are_noticed() -> None:
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


def test_memory_order_and_alignment_do_not_matter() -> None:
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    assert digest(x.to(memory_format=torch.channels_last)) == digest(x)
    half = torch.randn(41, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert digest(half[1:]) == digest(half[1:].clone())


def test_when_it_is_due() -> None:
    assert [step for step in range(3500) if is_due(step)] == [2, 10, 100, 1000, 2000, 3000]
