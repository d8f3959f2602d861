"""GSpar sends as many elements as it was given."""

from __future__ import annotations

import pytest

from lowbit_strategy import GSpar
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE = (64, 128)


def test_gspar_sends_as_many_as_it_was_given_on_average() -> None:
    matrix, gradient = OneTensor(GSpar(density=0.05), SHAPE, 1), gaussian(SHAPE, 0)
    counts = [int(matrix.step([gradient]).count_nonzero()) for _ in range(20)]
    assert sum(counts) / 20 == pytest.approx(0.05 * gradient.numel(), rel=0.05)
