"""Orthonormal columns, the same way on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GRAM_SCHMIDT_COLUMNS = 2  # up to here it is as accurate as a QR decomposition, and faster


def orthogonalize_all(matrices: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    """`orthogonalize` of each; matrices of one shape take one call together, which on a GPU is far fewer launches."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    results = list(matrices)
    for indices in by_shape.values():
        batch_BNR = torch.stack([matrices[index] for index in indices])
        for index, result in zip(indices, orthogonalize(batch_BNR, epsilon), strict=True):
            results[index] = result
    return results


def orthogonalize(matrix_BNR: Tensor, epsilon: float) -> Tensor:
    """float32 [..., N, R] with orthonormal columns that span the same space; N >= R.

    Args:
        matrix_BNR: Finite; any batch dims in front.
        epsilon: Times the norm of the matrix, added to the norms of columns in Gram-Schmidt, so that a column that
            depends on earlier ones shrinks instead of becoming rounding noise of length 1. Columns of zeros stay zeros.
    """
    if matrix_BNR.shape[-1] > _GRAM_SCHMIDT_COLUMNS:
        return torch.linalg.qr(matrix_BNR).Q
    norm_B1 = matrix_BNR.flatten(-2).norm(dim=-1, keepdim=True)
    smallest_B1 = norm_B1 * epsilon + torch.finfo(torch.float32).tiny
    columns: list[Tensor] = []
    for column in matrix_BNR.unbind(-1):
        for earlier in columns:
            column = column - (earlier * column).sum(-1, keepdim=True) * earlier
        columns.append(column / (column.norm(dim=-1, keepdim=True) + smallest_B1))
    return torch.stack(columns, -1)
