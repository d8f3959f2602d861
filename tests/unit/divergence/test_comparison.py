"""When ranks compare their parameters."""

from __future__ import annotations

from lowbit_strategy.divergence.comparison import is_due


def test_when_it_is_due() -> None:
    assert [step for step in range(3500) if is_due(step)] == [2, 10, 100, 1000, 2000, 3000]
