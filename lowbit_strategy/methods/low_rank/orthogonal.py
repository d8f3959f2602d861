"""Orthonormal columns and products of thin matrices, bit for bit the same on every rank.

Each rank computes them for itself, and ranks may have GPUs of different types: a decomposition or a matrix product of a
library adds in an order that the library chooses for the device. Here every number comes from additions,
multiplications, divisions and square roots of single elements, in an order that is written down; those are rounded
alike everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.blocks import tree_sum

_ONE_PASS_COLUMNS = 2  # more lose orthogonality to rounding, and are made orthogonal once more
_CACHE_ELEMENTS = 1 << 16  # of a product on the CPU at a time


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
    """float32 [..., N, R] with orthonormal columns that span the same space, by modified Gram-Schmidt; N >= R.

    Args:
        matrix_BNR: Finite; any batch dims in front.
        epsilon: Times the norm of the matrix, added to the norms of columns, so that a column that depends on earlier
            ones shrinks instead of becoming rounding noise of length 1. Columns of zeros stay zeros.
    """
    columns_BRN = matrix_BNR.transpose(-1, -2).contiguous()
    for _ in range(1 if matrix_BNR.shape[-1] <= _ONE_PASS_COLUMNS else 2):
        columns_BRN = _gram_schmidt(columns_BRN, epsilon)
    return columns_BRN.transpose(-1, -2).contiguous()


def _gram_schmidt(columns_BRN: Tensor, epsilon: float) -> Tensor:
    square_BR = _sum(columns_BRN * columns_BRN)
    smallest_B11 = (_root(_sum(square_BR)) * epsilon + torch.finfo(torch.float32).tiny)[..., None, None]
    done, rest_BRN = [], columns_BRN
    for _ in range(columns_BRN.shape[-2]):
        column_B1N, rest_BRN = rest_BRN[..., :1, :], rest_BRN[..., 1:, :]
        length_B11 = _root(_sum(column_B1N * column_B1N))[..., None]
        column_B1N = column_B1N / (length_B11 + smallest_B11)
        rest_BRN = rest_BRN - _sum(rest_BRN * column_B1N)[..., None] * column_B1N
        done.append(column_B1N)
    return torch.cat(done, -2)


def _sum(x_BN: Tensor) -> Tensor:
    """Over the last dim, halves added to each other until one element is left; zeros make it a power of two."""
    numel = x_BN.shape[-1]
    return tree_sum(torch.nn.functional.pad(x_BN, (0, (1 << (numel - 1).bit_length()) - numel)))


def _root(x: Tensor) -> Tensor:
    """Rounded once, which the square root of float32 is not on every device."""
    return x.double().sqrt().float()


def product(p_NR: Tensor, q_MR: Tensor) -> Tensor:
    """float32 [N, M]: ``p q^T``, one column after the other."""
    out_NM = p_NR.new_empty(p_NR.shape[0], q_MR.shape[0])
    num_rows = len(out_NM) if out_NM.is_cuda else max(1, _CACHE_ELEMENTS // max(1, len(q_MR)))
    columns_RM = q_MR.T.contiguous()
    for part_NM, rows_NR in zip(out_NM.split(num_rows), p_NR.split(num_rows), strict=True):
        torch.mul(rows_NR[:, :1], columns_RM[0], out=part_NM)
        for at, column_M in enumerate(columns_RM[1:], 1):
            part_NM += rows_NR[:, at : at + 1] * column_M
    return out_NM
