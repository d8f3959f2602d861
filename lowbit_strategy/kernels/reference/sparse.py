"""The definition of a sparse step's ops in plain PyTorch, except selection: the largest magnitude, positions, sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BITS = 16


class BlockGrid(NamedTuple):
    """Parameters one after the other, each (or each rank's row of it) cut into blocks of 65,536 positions.

    Args:
        span_V: int64, positions of each parameter, or of one rank's row of it.
        first_block_V: int64, the first block of each parameter.
        start_K: int64, where each block starts in its parameter (row).
        length_K: int64, positions of each block.
        num_destinations: 1, or one per row: each gets a message about its own.
    """

    span_V: Tensor
    first_block_V: Tensor
    start_K: Tensor
    length_K: Tensor
    num_destinations: int

    @property
    def num_blocks(self) -> int:
        return self.length_K.numel()


class Located(NamedTuple):
    """Entries of all parameters in the order of messages: by destination, then parameter, then position.

    Args:
        order: int64 [E], where each comes from in the parameters' concatenation; None: as it is.
        counts_DK: int32, entries in each block, for each destination.
        positions: uint8 [2 * E]: in their blocks, two bytes each.
        sizes_DV: Entries of each parameter, for each destination.
    """

    order: Tensor | None
    counts_DK: Tensor
    positions: Tensor
    sizes_DV: list[list[int]]


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each, one look at the device for all; infinity where one has inf or NaN."""
    if not tensors:
        return []
    largest = torch._foreach_norm([x if x.numel() else x.new_zeros(1) for x in tensors], math.inf)
    return [math.inf if math.isnan(value) else value for value in torch.stack(largest).tolist()]


def locate(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
    """Put entries, ascending in each of their parameters, in the order of messages."""
    num_messages, num_views = grid.num_destinations, len(sizes)
    sizes_V = torch.tensor(sizes, device=index_E.device)
    view_E = torch.arange(num_views, device=index_E.device).repeat_interleave(sizes_V, output_size=sum(sizes))
    order, local_E, sizes_DV = None, index_E, [list(sizes)]
    first_E = grid.first_block_V.index_select(0, view_E)
    if num_messages > 1:
        span_E = grid.span_V.index_select(0, view_E)
        destination_E = index_E // span_E
        order = destination_E.argsort(stable=True)
        local_E = (index_E - destination_E * span_E).index_select(0, order)
        first_E = (first_E + destination_E * grid.num_blocks).index_select(0, order)
        places = torch.bincount(destination_E * num_views + view_E, minlength=num_messages * num_views)
        sizes_DV = places.view(num_messages, -1).tolist()
    counts = torch.bincount(first_E + (local_E >> BLOCK_BITS), minlength=num_messages * grid.num_blocks)
    positions = (local_E & 0xFFFF).to(torch.int16).view(torch.uint8)
    return Located(order, counts.to(torch.int32).view(num_messages, -1), positions, sizes_DV)


def positions(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    """The positions in their parameters, int64 [count], that a message starts with; None if one cannot be."""
    low_E = wire[: 2 * count].clone().view(torch.int16).long() & 0xFFFF
    block_E = torch.arange(grid.num_blocks, device=wire.device).repeat_interleave(counts_K, output_size=count)
    if bool((low_E >= grid.length_K.index_select(0, block_E)).any()):
        return None
    return grid.start_K.index_select(0, block_E) + low_E


def take_out_(residual: Tensor, indices: Tensor, values: Tensor, sent: Tensor) -> None:
    """``residual[indices] = values - sent``, 0 where that is not finite."""
    residual.index_copy_(0, indices, (values - sent).nan_to_num_(0.0, 0.0, 0.0))


def write_sum_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    """``out = alpha * sum of parts``, added part by part in float32; zeros where there is nothing."""
    dense = out.dtype == torch.float32
    total = out.zero_() if dense else torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for indices, values in parts:
        total.index_add_(0, indices, values)
    if alpha != 1.0:
        everywhere = torch.cat([indices for indices, _ in parts])  # what comes twice is written twice, equally
        total.index_copy_(0, everywhere, total.index_select(0, everywhere).mul_(alpha))
    if not dense:
        out.copy_(total)
