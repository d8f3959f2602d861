"""Packing of integers: exact, and as short as it claims."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods.zoo.integers import pack_integers, packed_nbytes, unpack_integers


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 10, 15, 31, 63, 127, 128, 381, 635, 5000, 100_000])
def test_round_trip(limit: int) -> None:
    for numel in (0, 1, 7, 8, 9, 63, 1000):
        generator = torch.Generator().manual_seed(limit)
        q = torch.randint(-limit, limit + 1, (3, numel), generator=generator, dtype=torch.int32)
        if numel > 1:
            q[0, 0], q[1, 1] = limit, -limit
        packed = pack_integers(q, limit)
        assert packed.dtype == torch.uint8
        assert packed.shape == (3, packed_nbytes(numel, limit))
        assert torch.equal(unpack_integers(packed, numel, limit), q)


@pytest.mark.parametrize(
    ("limit", "bits"),
    [(1, 1.6), (2, 8 / 3), (3, 3), (7, 4), (15, 5), (127, 8), (5 * 127, 11)],
)
def test_bits_an_element(limit: int, bits: float) -> None:
    assert packed_nbytes(120_000, limit) * 8 / 120_000 == pytest.approx(bits)
