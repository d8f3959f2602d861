"""The line after 50 steps."""

from __future__ import annotations

from lowbit_strategy.plan.step_line import median_step
from lowbit_strategy.plan.step_times import StepTime


def test_the_median_of_each() -> None:
    times = [StepTime(1.0, 0.5), StepTime(3.0, 0.1), StepTime(2.0, 0.2)]
    assert median_step(times) == StepTime(2.0, 0.2)
    assert median_step([StepTime(1.0, None)]) == StepTime(1.0, None)
