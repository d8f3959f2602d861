"""The product of two thin matrices with the same bits on every rank, as in `lowbit_strategy.kernels.orthogonal`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.segments import CACHE_ELEMENTS


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
