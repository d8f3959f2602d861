"""What the demo compares with."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from recipes import demo


def test_the_baseline_is_the_frameworks_own_strategy() -> None:
    """Not this package's `Dense`: the comparison has to be everybody's."""
    compressed, baseline = (type(StrategyRegistry.get(name)) for name in demo.RUNS)
    assert compressed.__module__.startswith("lowbit_strategy.")
    assert baseline.__module__.startswith("lightning.")
