"""Public ops for a sparse step except selection: the largest magnitude, positions as bytes and back, the residual's
update. Results do not depend on the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import ModuleType

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import sparse as native
from lowbit_strategy.kernels.reference import sparse as reference
from lowbit_strategy.kernels.reference.sparse import BlockGrid, Located


def _kernels(device: torch.device) -> ModuleType:
    return native if is_native(device) else reference


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each tensor: infinity if it has inf or NaN, 0 if it is empty."""
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
        index_E: int64 positions in the parameters, one parameter after the other, ascending in each.
        sizes: Number of entries of each parameter.
        grid: How parameters are cut.
    """
    found: Located = _kernels(index_E.device).locate(index_E.contiguous(), sizes, grid)
    return found


def positions(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    """Decode the positions at the start of a message, int64 [count], relative to their parameters; None if one is
    impossible.

    Args:
        counts_K: int32 number of entries in each block, not negative, `count` in total.
        wire: uint8, at least two bytes per entry.
        count: Total number of positions.
        grid: How parameters are cut.
    """
    found: Tensor | None = _kernels(wire.device).positions(counts_K.contiguous(), wire.contiguous(), count, grid)
    return found


def take_out_(residual: Tensor, indices: Tensor, values: Tensor, sent: Tensor) -> None:
    """Set ``residual[indices] = values - sent``, or 0 where that is not finite.

    Args:
        residual: float32 [N], contiguous.
        indices: int64 [k], without duplicates.
        values: float32 [k].
        sent: float32 [k].
    """
    if indices.numel():
        _kernels(residual.device).take_out_(residual, indices.contiguous(), values.contiguous(), sent.contiguous())


def write_sum_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    """``out = alpha * sum of parts``, added part by part in float32; zeros elsewhere.

    Args:
        out: float [N], contiguous.
        parts: For each source in order, positions, int64 [k] without duplicates, and values, float32 [k].
        alpha: 1/W makes it a mean.
    """
    if is_native(out.device) and _is_plain(out):
        native.write_sum_(out, [(indices.contiguous(), values.contiguous()) for indices, values in parts], alpha)
    else:
        reference.write_sum_(out, parts, alpha)
