"""Pieces laid end to end: what is derived of blocks and elements, and how little is kept for it."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.codecs.packed import Packed
from lowbit_strategy.kernels.reference.rng import dither, stream_key
from lowbit_strategy.kernels.segments import Segment, Segments

CPU = torch.device("cpu")
SEED = 0x9E3779B1


def packed(block_size: int) -> Packed:
    rows, at = [], 5
    for i, numel in enumerate((1000, 0, 1, 128, 300)):
        rows.append(Segment(at, numel, 0, 0, salt=0xDEADBEE0 + i))
        at += numel + 3
    return Packed(Segments(rows), block_size)


@pytest.mark.parametrize("block_size", [1, 32, 128])
def test_every_elements_place_is_derived_of_its_block(block_size: int) -> None:
    it = packed(block_size)
    valid = it.valid(CPU).view(-1).split(it.lengths)
    noise = it.noise(SEED, 1, CPU).view(-1).split(it.lengths)
    for row, length, is_valid, numbers in zip(it.source.rows, it.lengths, valid, noise, strict=True):
        assert torch.equal(is_valid, torch.arange(length) < row.numel)
        assert torch.equal(numbers, dither(0, length, stream_key(SEED, row.salt, 1), CPU))


def test_a_piece_is_idle_if_all_of_it_is_zero() -> None:
    it = packed(32)
    x = torch.zeros(it.numel)
    where = [slice(row.x_offset, row.x_offset + row.numel) for row in it.segments.rows]
    x[where[0]][999] = float("nan")
    x[where[3]][64] = -1e-40
    idle = it.idle(x).split(it.lengths)
    assert [bool(piece.all()) for piece in idle] == [False, True, True, False, True]
    assert [bool(piece.any()) for piece in idle] == [False, False, True, False, True]


def test_what_is_kept_grows_with_blocks_not_with_elements() -> None:
    """One byte per element of index tables would double an int8 residual's memory."""
    it = Packed(Segments([Segment(0, 2**20, 0, 0)]), 128)
    it.valid(CPU), it.noise(SEED, 0, CPU), it.idle(torch.zeros(it.numel))
    kept = sum(tensor.nbytes for table in it._on_device.values() for tensor in table)
    assert kept / it.numel <= 8 / 128 + 1e-3
