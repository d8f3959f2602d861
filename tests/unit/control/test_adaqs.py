"""AdaQS's ratio is that of the gradient's mean and noise, whatever the number of steps it is taken over."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.adaqs import AdaQS, mean_to_deviation
from lowbit_strategy.control.base import Progress, Telemetry
from lowbit_strategy.methods.loco import LoCo

NUMEL = 40_000
LADDER = tuple(LoCo(bits=bits) for bits in (8, 4, 2))


def telemetry(ratio: float, steps: int, seed: int = 0) -> Telemetry:
    """Of gradients whose mean has `ratio` times the norm of their noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, NUMEL, generator=generator)
    mean = torch.randn(NUMEL, generator=generator)
    gradients = noise + ratio * mean * math.sqrt(NUMEL) / mean.norm()
    return Telemetry(
        progress=Progress(step=steps),
        accumulated_steps=steps,
        accumulated_norm={"w": float(gradients.sum(0).norm())},
        accumulated_square={"w": float(gradients.square().sum())},
    )


@pytest.mark.parametrize("steps", [5, 10, 40])
@pytest.mark.parametrize("ratio", [2.0, 0.5, 0.2])
def test_ratio_does_not_depend_on_the_number_of_steps(ratio: float, steps: int) -> None:
    assert mean_to_deviation(telemetry(ratio, steps), ["w"]) == pytest.approx(ratio, rel=0.08)


def test_noise_alone_has_no_ratio_to_speak_of() -> None:
    measured = [mean_to_deviation(telemetry(0.0, 10, seed), ["w"]) for seed in range(8)]
    assert all(ratio is not None and ratio < 0.05 for ratio in measured)
    assert 0.0 in measured  # the estimated square is as often below zero


def test_alike_gradients_have_no_ratio() -> None:
    alike = Telemetry(
        progress=Progress(step=4), accumulated_steps=4, accumulated_norm={"w": 8.0}, accumulated_square={"w": 16.0}
    )
    assert mean_to_deviation(alike, ["w"]) is None


def test_every_level_is_reached_at_the_default_interval() -> None:
    controller = AdaQS(ladder=LADDER)
    state = controller.init([TensorSpec("w", (200, 200))], 2)
    levels = []
    for reading in range(36):
        ratio = 1.2 if reading < 6 else 0.4 if reading < 18 else 0.1
        decision = controller.decide(telemetry(ratio, controller.interval, reading), state)
        state = decision.state
        levels.append(decision.levels["w"])
    assert [levels[at] for at in (5, 17, 35)] == [2, 1, 0]
    assert levels == sorted(levels, reverse=True)
