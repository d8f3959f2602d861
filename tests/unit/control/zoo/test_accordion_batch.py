"""Accordion on the batch size: it grows once, and stays large."""

from __future__ import annotations

import pytest

from lowbit_strategy.control import AccordionBatch, Progress, Telemetry
from testing.controllers import matrices, run

INTERVAL = 10


def progresses(num_steps: int) -> list[Progress]:
    return [Progress(step=step, epoch=step // 5) for step in range(num_steps)]


def test_batch_grows_outside_critical_regimes_and_never_shrinks() -> None:
    controller = AccordionBatch(small=2, large=16, interval=INTERVAL, unit="steps")
    # A window in steps has as many gradients whatever the batch: the norm of their sum follows the gradient alone.
    norm = {1: 10.0, 2: 4.0, 3: 3.9, 4: 4.0, 5: 1.0, 6: 1.0}
    decisions = run(
        controller, matrices("a"), progresses(70), norms=lambda progress: {"a": norm[progress.step // INTERVAL]}
    )
    assert all(decision.learning_rate_factor == decision.accumulation / 2 for decision in decisions)
    assert not any(decision.levels for decision in decisions)
    assert [decision.accumulation for decision in decisions[::INTERVAL]] == [2, 2, 2, 16, 16, 16, 16]


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_the_batch_of_a_constant_gradient_stays_large(unit: str) -> None:
    """Sums of real gradients: g + noise / sqrt(batch), a window of 10 steps or of one epoch of 80 batches."""
    controller = AccordionBatch(small=1, large=8, interval=INTERVAL if unit == "steps" else 1, unit=unit)
    state, accumulation, batches, step, total, sizes = controller.init(matrices("a"), 4), 1, 0, 0, 0.0, []
    while batches < 1600:
        progress = Progress(step=step, epoch=batches // 80)
        telemetry = Telemetry(progress=progress)
        if controller.reads_accumulated(progress, state):
            telemetry, total = Telemetry(progress=progress, accumulated_norm={"a": total}), 0.0
        decision = controller.decide(telemetry, state)
        state, accumulation = decision.state, decision.accumulation
        assert accumulation is not None
        total, step, batches = total + 1.0, step + 1, batches + accumulation  # the norm of a sum of equal gradients
        sizes.append(accumulation)
    assert sizes.index(8) <= 160
    assert set(sizes[sizes.index(8) :]) == {8}


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_the_batch_of_pure_noise_does_not_swing(unit: str) -> None:
    """A mean of 8 times as many samples is smaller by the square root of 8, whatever the regime."""
    controller = AccordionBatch(small=1, large=8, interval=INTERVAL if unit == "steps" else 1, unit=unit)
    state, accumulation, batches, step, energy, sizes = controller.init(matrices("a"), 4), 1, 0, 0, 0.0, []
    while batches < 3200:
        progress = Progress(step=step, epoch=batches // 80)
        telemetry = Telemetry(progress=progress)
        if controller.reads_accumulated(progress, state):
            telemetry, energy = Telemetry(progress=progress, accumulated_norm={"a": energy**0.5}), 0.0
        decision = controller.decide(telemetry, state)
        state, accumulation = decision.state, decision.accumulation
        assert accumulation is not None
        energy, step, batches = energy + 1.0 / accumulation, step + 1, batches + accumulation
        sizes.append(accumulation)
    assert set(sizes[sizes.index(8) :]) == {8}
    assert sizes.index(8) <= 3 * 80


@pytest.mark.parametrize("options", [{"small": 8, "large": 8}, {"small": 0}, {"interval": 0}])
def test_bad_batch_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        AccordionBatch(**options)
