"""The parts of a sparse step besides choosing, against their plain definitions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.block_positions import BLOCK_BITS, BlockGrid, locate, positions
from lowbit_strategy.kernels.peaks import peaks
from lowbit_strategy.kernels.sparse import take_out_, write_sum_

_BLOCK = 1 << BLOCK_BITS


def defined(op: Callable[..., Any], *args: Any) -> Any:
    """What the definition in plain PyTorch gives."""
    with patch.dict(os.environ, LOWBIT_KERNELS="torch"):
        return op(*args)


def _grid(spans: list[int], num_destinations: int) -> BlockGrid:
    blocks = [-(-span // _BLOCK) for span in spans]
    first = [sum(blocks[:v]) for v in range(len(spans))]
    starts = [(v, b * _BLOCK) for v, n in enumerate(blocks) for b in range(n)]
    lengths = [min(spans[v] - start, _BLOCK) for v, start in starts]
    tables = (spans, first, [start for _, start in starts], lengths)
    return BlockGrid(*(torch.tensor(table, dtype=torch.int64) for table in tables), num_destinations)  # type: ignore[call-arg,arg-type]


def _entries(spans: list[int], num_destinations: int, share: float, seed: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.rand(num_destinations * span, generator=generator) < share).nonzero().view(-1) for span in spans]
    return torch.cat(parts), [part.numel() for part in parts]


@pytest.mark.parametrize("special", [None, math.inf, -math.inf, math.nan])
def test_the_peak_is_the_largest_magnitude(path: str, special: float | None) -> None:
    for numel in (1, 31, 33, 4097, 200_001):
        _check_peaks(numel, special)


def _check_peaks(numel: int, special: float | None) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if special is not None:
        x[numel // 2] = special
    wanted = float(x.abs().max()) if special is None else math.inf
    parts = [x, x.bfloat16(), x.view(1, -1).expand(2, -1), torch.zeros(numel), -torch.zeros(3), torch.empty(0)]
    rounded = float(x.bfloat16().abs().max()) if special is None else math.inf
    assert peaks(parts) == [wanted, rounded, wanted, 0.0, 0.0, 0.0]
    assert peaks([x[i:] for i in range(min(4, numel))]) == defined(peaks, [x[i:] for i in range(min(4, numel))])
    rows = torch.stack([x, x]).t()[:, :1]
    assert peaks([rows, torch.stack([-x, x])[:, : numel // 2 + 1]]) == [
        wanted,
        *defined(peaks, [x[: numel // 2 + 1]]),
    ]
    assert peaks([]) == []


@pytest.mark.parametrize("value", [-3e38, -1e-45, 1e-45])
def test_a_peak_is_found_anywhere_with_any_number_of_threads(path: str, value: float) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for at in (0, 4095, 70_000, 199_999):
                x = torch.zeros(200_000)
                x[at] = value
                assert peaks([x]) == [abs(float(x[at]))]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_destinations", [1, 3])
@pytest.mark.parametrize("spans", [[0], [100], [_BLOCK], [_BLOCK + 1], [0, 7, 3 * _BLOCK - 5, 1, 0, _BLOCK]])
def test_messages_of_positions_are_the_definition_and_can_be_read(
    path: str, spans: list[int], num_destinations: int
) -> None:
    for share in (0.0, 0.001, 1.0):
        _check_positions(spans, num_destinations, share)


def _check_positions(spans: list[int], num_destinations: int, share: float) -> None:
    grid = _grid(spans, num_destinations)
    index_E, sizes = _entries(spans, num_destinations, share, seed=len(spans))
    ours, wanted = locate(index_E, sizes, grid), defined(locate, index_E, sizes, grid)
    assert torch.equal(ours.counts_DK, wanted.counts_DK)
    assert ours.counts_DK.dtype == torch.int32
    assert torch.equal(ours.positions, wanted.positions)
    assert ours.sizes_DV == wanted.sizes_DV
    assert (ours.order is None) == (wanted.order is None) == (num_destinations == 1)
    if ours.order is not None and wanted.order is not None:
        assert torch.equal(ours.order, wanted.order)
    at, found = 0, []
    for d in range(num_destinations):
        count = sum(ours.sizes_DV[d])
        read = positions(ours.counts_DK[d], ours.positions[2 * at : 2 * (at + count)], count, grid)
        assert read is not None
        found += [part + d * span for part, span in zip(read.split(ours.sizes_DV[d]), spans, strict=True)]
        at += count
    order = torch.arange(index_E.numel()) if ours.order is None else ours.order
    assert torch.equal(torch.cat(found), index_E[order])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    spans=st.lists(st.integers(1, 2 * _BLOCK), min_size=1, max_size=3),
    counts=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    wire=st.binary(min_size=60, max_size=60),
)
def test_any_message_is_read_alike_or_refused(spans: list[int], counts: list[int], wire: bytes) -> None:
    grid = _grid(spans, 1)
    counts_K = torch.tensor(counts[: grid.num_blocks], dtype=torch.int32)
    bytes_B = torch.frombuffer(bytearray(wire), dtype=torch.uint8)
    count = int(counts_K.sum())
    wanted, ours = (defined(positions, counts_K, bytes_B, count, grid), positions(counts_K, bytes_B, count, grid))
    assert (ours is None) == (wanted is None)
    if ours is not None and wanted is not None:
        assert torch.equal(ours, wanted)


@pytest.mark.skipif(not native.available(), reason="the C extension is not built")
@pytest.mark.parametrize("counts", [[3, 4], [-1, 7], [0, 0], [2**31 - 1, 2], [2, 2**31 - 1]])
def test_c_does_not_write_beyond_its_room_whatever_the_counts(counts: list[int]) -> None:
    grid, wire = _grid([2 * _BLOCK], 1), torch.zeros(12, dtype=torch.uint8)
    assert positions(torch.tensor(counts, dtype=torch.int32), wire, 6, grid) is None


def test_what_is_left_is_the_definition(path: str) -> None:
    values = torch.tensor([1.0, -0.0, 3e38, math.inf, math.nan, 2.0, -1e-45])
    sent = torch.tensor([1.0, 0.0, -3e38, 1.0, 1.0, 0.5, 0.0])
    indices = torch.tensor([0, 2, 3, 5, 8, 13, 21])
    ours, wanted = torch.full((30,), 7.0), torch.full((30,), 7.0)
    take_out_(ours, indices, values, sent)
    defined(take_out_, wanted, indices, values, sent)
    assert torch.equal(ours.view(torch.int32), wanted.view(torch.int32))
    assert ours[indices].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.5, -(2.0**-149)]


@pytest.mark.parametrize(("num_parts", "alpha"), [(1, 1.0), (2, 0.5), (5, 1 / 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_entries_are_the_definition(path: str, alpha: float, num_parts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    parts = []
    for count in range(num_parts):
        indices = torch.randperm(50, generator=generator)[: 10 * count].sort().values
        parts.append((indices, torch.randn(indices.numel(), generator=generator)))
    if num_parts > 2:
        parts[1][1][0], parts[2][1][:2] = -0.0, torch.tensor([math.nan, 3e38])
    ours, wanted = torch.full((50,), 7.0, dtype=dtype), torch.full((50,), 8.0, dtype=dtype)
    write_sum_(ours, parts, alpha)
    defined(write_sum_, wanted, parts, alpha)
    assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
    exact = sum((torch.zeros(50).index_add_(0, *part) for part in parts), torch.zeros(50)) * alpha
    torch.testing.assert_close(ours.float(), exact, rtol=0.01, atol=0, equal_nan=True)
