"""Orthonormal columns, and products of thin matrices, with the same bits on every rank.

Each rank computes them itself, possibly on a different type of GPU, and library routines add in an order that depends
on the device. Here every number comes from additions, multiplications, divisions and square roots of single elements in
a fixed order, which round in the same way everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.segments import CACHE_ELEMENTS

_ONE_PASS_COLUMNS = 2  # with more columns, rounding costs orthogonality, and a second pass is needed
_EPSILON = 1e-8  # added to columns' norms, times the matrix's: dependent columns shrink instead of becoming noise


def orthogonalize_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Apply `orthogonalize` to each matrix, with one call per shape to save kernel launches."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(index)
    results = list(matrices)
    for indices in by_shape.values():
        batch_BNR = torch.stack([matrices[index] for index in indices])
        for index, result in zip(indices, orthogonalize(batch_BNR), strict=True):
            results[index] = result
    return results


def orthogonalize(matrix_BNR: Tensor) -> Tensor:
    """Return float32 [..., N, R] with orthonormal columns that span the same space, by modified Gram-Schmidt; N >= R.

    Args:
        matrix_BNR: Finite values; any leading batch dims. Columns of zeros stay zero.
    """
    numel = matrix_BNR.shape[-2]
    columns_BRN = _padded(matrix_BNR.transpose(-1, -2).contiguous())
    for _ in range(1 if matrix_BNR.shape[-1] <= _ONE_PASS_COLUMNS else 2):
        columns_BRN = _gram_schmidt(columns_BRN)
    return columns_BRN[..., :numel].transpose(-1, -2).contiguous()


def _gram_schmidt(columns_BRN: Tensor) -> Tensor:
    """Gram-Schmidt with square roots in float64, rounded once, because float32 roots differ between devices."""
    square_B = tree_sum(_padded(tree_sum(columns_BRN * columns_BRN)))
    smallest_B11 = (square_B.double().sqrt().float() * _EPSILON + torch.finfo(torch.float32).tiny)[..., None, None]
    done, rest_BRN = [], columns_BRN
    for _ in range(columns_BRN.shape[-2]):
        column_B1N, rest_BRN = rest_BRN[..., :1, :], rest_BRN[..., 1:, :]
        length_B11 = tree_sum(column_B1N * column_B1N).double().sqrt().float()[..., None]
        column_B1N = column_B1N / (length_B11 + smallest_B11)
        done.append(column_B1N)
        if rest_BRN.shape[-2]:
            rest_BRN = rest_BRN - tree_sum(rest_BRN * column_B1N)[..., None] * column_B1N
    return torch.cat(done, -2)


def _padded(x_BN: Tensor) -> Tensor:
    """Pad with zeros to a power of two, as `tree_sum` needs, which adds halves until one is left."""
    numel = x_BN.shape[-1]
    return torch.nn.functional.pad(x_BN, (0, (1 << (numel - 1).bit_length()) - numel))


def product(p_NR: Tensor, q_MR: Tensor) -> Tensor:
    """``p q^T`` as float32 [N, M], computed one column after the other."""
    out_NM = p_NR.new_empty(p_NR.shape[0], q_MR.shape[0])
    num_rows = len(out_NM) if out_NM.is_cuda else max(1, CACHE_ELEMENTS // max(1, len(q_MR)))
    columns_RM = q_MR.T.contiguous()
    for part_NM, rows_NR in zip(out_NM.split(num_rows), p_NR.split(num_rows), strict=True):
        torch.mul(rows_NR[:, :1], columns_RM[0], out=part_NM)
        for at, column_M in enumerate(columns_RM[1:], 1):
            part_NM += rows_NR[:, at : at + 1] * column_M
    return out_NM
