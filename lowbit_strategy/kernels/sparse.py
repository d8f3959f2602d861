"""The parts of a sparse step except selection: how large gradients are, positions as bytes and back, what is left in
the residual. The public ops; results do not depend on the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import sparse as native
from lowbit_strategy.kernels.reference import sparse as reference
from lowbit_strategy.kernels.reference.sparse import BlockGrid, Located


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each, floats; infinity where one has inf or NaN, 0 of nothing."""
    if not tensors or not is_native(tensors[0].device):
        return reference.peaks(tensors)
    if set(map(attrgetter("dtype"), tensors)) == {torch.float32} and all(map(Tensor.is_contiguous, tensors)):
        return native.peaks(tensors)
    return [_peak(x) for x in tensors]


def _peak(x: Tensor) -> float:
    rows = [x] if x.is_contiguous() else x.unbind()  # under reduce-scatter a bucket has a row for each rank
    if all(_is_plain(row) for row in rows):
        return max(native.peaks(rows))
    return reference.peaks([x])[0]


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def locate(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
    """Put entries in the order of messages.

    Args:
        index_E: int64, positions in their parameters, ascending in each, the parameters one after the other.
        sizes: How many of them each parameter has.
        grid: How parameters are cut.
    """
    if is_native(index_E.device):
        return native.locate(index_E.contiguous(), sizes, grid)
    return reference.locate(index_E, sizes, grid)


def positions(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    """The positions in their parameters, int64 [count], that a message starts with; None if one cannot be.

    Args:
        counts_K: int32, entries in each block: not negative, `count` in all.
        wire: uint8, at least two bytes for each.
        count: How many positions all blocks have.
        grid: How parameters are cut.
    """
    if is_native(wire.device):
        return native.positions(counts_K.contiguous(), wire.contiguous(), count, grid)
    return reference.positions(counts_K, wire, count, grid)


def take_out_(residual: Tensor, indices: Tensor, values: Tensor, sent: Tensor) -> None:
    """``residual[indices] = values - sent``, 0 where that is not finite.

    Args:
        residual: float32 [N], contiguous.
        indices: int64 [k], none twice.
        values: float32 [k].
        sent: float32 [k].
    """
    if not indices.numel():
        return
    if is_native(residual.device):
        native.take_out_(residual, indices.contiguous(), values.contiguous(), sent.contiguous())
    else:
        reference.take_out_(residual, indices, values, sent)


def write_sum_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    """``out = alpha * sum of parts``, added part by part in float32; zeros where there is nothing.

    Args:
        out: float [N], contiguous.
        parts: Positions, int64 [k], none twice, and values, float32 [k], of each source in order.
        alpha: 1/W makes it a mean.
    """
    if is_native(out.device) and _is_plain(out):
        native.write_sum_(out, [(indices.contiguous(), values.contiguous()) for indices, values in parts], alpha)
    else:
        reference.write_sum_(out, parts, alpha)
