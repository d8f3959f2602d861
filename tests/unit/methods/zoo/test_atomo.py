"""ATOMO sends as many atoms as it was given."""

from __future__ import annotations

import torch

from lowbit_strategy import ATOMO
from testing.worlds.one_tensor import OneTensor, gaussian


def test_every_rank_sends_the_same_number_of_atoms() -> None:
    gradient = gaussian((32, 48), 0)
    matrix = OneTensor(ATOMO(rank=3), (32, 48), 1)
    ranks = [int(torch.linalg.matrix_rank(matrix.step([gradient]).view(32, 48))) for _ in range(20)]
    assert set(ranks) == {3}
