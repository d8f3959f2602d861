"""How much each replica counts in a mean."""

from __future__ import annotations

import pytest

from lowbit_strategy.elastic.replica import sample_weights


@pytest.mark.parametrize("trained", [(8, 8, 8), (0, 0), (3, 5, 0)])
def test_weights_are_one_on_average(trained: tuple[int, ...]) -> None:
    weights = sample_weights(trained)
    assert sum(weights) == pytest.approx(len(trained))
    if len(set(trained)) == 1:
        assert set(weights) == {1.0}
