"""Orthonormal columns, the same way on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

_GRAM_SCHMIDT_COLUMNS = 2  # up to here it is as accurate as a QR decomposition, and faster


def orthogonalize(matrix_NR: Tensor, epsilon: float) -> Tensor:
    """float32 [N, R] with orthonormal columns that span the same space; N >= R.

    Args:
        matrix_NR: Finite.
        epsilon: Times the norm of the matrix, added to the norms of columns in Gram-Schmidt, so that a column that
            depends on earlier ones shrinks instead of becoming rounding noise of length 1. Columns of zeros stay zeros.
    """
    if matrix_NR.shape[1] > _GRAM_SCHMIDT_COLUMNS:
        return torch.linalg.qr(matrix_NR).Q
    smallest = matrix_NR.norm() * epsilon + torch.finfo(torch.float32).tiny
    columns: list[Tensor] = []
    for column in matrix_NR.unbind(1):
        for earlier in columns:
            column = column - (earlier * column).sum() * earlier
        columns.append(column / (column.norm() + smallest))
    return torch.stack(columns, 1)
