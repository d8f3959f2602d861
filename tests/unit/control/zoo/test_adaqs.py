"""AdaQS's ratio is that of the gradient's mean and noise, whatever the number of steps it is taken over."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import Progress, Telemetry
from lowbit_strategy.control.zoo.adaqs import AdaQS, mean_to_deviation
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from testing.controllers import check_stop_and_resume, matrices, run
from testing.worlds.single import engine, gradients, reduce_step

NUMEL = 40_000
LADDER = EIGHT, FOUR, TWO = tuple(LoCo(bits=bits) for bits in (8, 4, 2))
STEPS = [Progress(step=step) for step in range(200)]
WEIGHTS = ("blocks.0.weight", "blocks.1.weight")


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


def falling_ratio(progress: Progress) -> dict[str, object]:
    """Of gradients with |mean| 1 and a given deviation, over the ten steps before: what the driver would measure."""
    num_steps = 10
    ratios = {"a": 2.0 if progress.step <= 100 else 0.8, "b": 2.0}
    return {
        "accumulated_steps": num_steps,
        "accumulated_norm": dict.fromkeys(ratios, float(num_steps)),
        "accumulated_square": {name: num_steps * (1 + ratio**-2) for name, ratio in ratios.items()},
    }


def test_adaqs_steps_lighter_when_the_ratio_has_fallen() -> None:
    controller = AdaQS(ladder=(EIGHT, FOUR, TWO), interval=10, ewma=1.0, per="parameter")
    decisions = run(controller, matrices("a", "b"), STEPS, accumulated=falling_ratio)
    assert [decisions[step].levels for step in (0, 109, 110, 199)] == [
        {"a": 2, "b": 2},
        {"a": 2, "b": 2},
        {"a": 1, "b": 2},
        {"a": 1, "b": 2},
    ]


def test_the_ratio_is_that_of_the_gradients() -> None:
    """From sums alone, both parameters together and without bias: the noise that is left in the mean is taken off."""
    generator = torch.Generator().manual_seed(0)
    gradients = {name: 0.7 + torch.randn(12, 50, generator=generator) for name in ("a", "b")}
    telemetry = Telemetry(
        progress=Progress(step=12),
        accumulated_steps=12,
        accumulated_norm={name: float(g.sum(0).norm()) for name, g in gradients.items()},
        accumulated_square={name: float(g.square().sum()) for name, g in gradients.items()},
    )
    both = torch.cat(list(gradients.values()), 1)
    noise = both.var(0, correction=1).sum()
    expected = ((both.mean(0).square().sum() - noise / 12) / noise).sqrt()
    assert mean_to_deviation(telemetry, ["a", "b"]) == pytest.approx(float(expected), rel=1e-4)
    assert mean_to_deviation(telemetry, ["c"]) is None


def test_adaqs_on_the_whole_model_and_after_a_restart() -> None:
    controller = AdaQS(ladder=(EIGHT, FOUR, TWO), interval=10, ewma=0.5, factor=0.6)
    arguments = (controller, matrices("a", "b"), STEPS)
    decisions = run(*arguments, accumulated=falling_ratio, restart_at=111)
    assert decisions[-1].levels == {"a": 1, "b": 1}
    assert decisions == run(*arguments, accumulated=falling_ratio)


@pytest.mark.parametrize(
    "options",
    [{"ladder": (FOUR,)}, {"ladder": (TWO, FOUR)}, {"factor": 1.0}, {"interval": 1}, {"ewma": 0}, {"per": "x"}],
)
def test_bad_adaqs(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        AdaQS(**{"ladder": (EIGHT, FOUR), **options})


@pytest.mark.parametrize("sharded", [False, True])
def test_adaqs_follows_the_noise_of_real_gradients(sharded: bool) -> None:
    """A signal that fades, whose elements have the mean 0 at every step, as behind layer norms."""
    sync = engine(Dense(), sharded=sharded)
    driver = AdaptiveDriver(AdaQS(ladder=(EIGHT, FOUR, TWO), interval=5, ewma=0.5), sync)
    signal = {name: values - values.mean() for name, values in gradients(1000).items()}
    history = []
    for step in range(60):
        noise = gradients(step, scale=1.0)
        size = 3.0 if step < 20 else 1.0 if step < 40 else 0.1
        mixed = {name: size * signal[name] + noise[name] - noise[name].mean() for name in noise}
        reduce_step(sync, mixed)
        history.append(driver.levels[WEIGHTS[0]])
    assert [history[step] for step in (15, 38, 59)] == [2, 1, 0]
    assert history == sorted(history, reverse=True)
    assert any("mean-to-deviation ratio fell" in event.switch.reason for event in driver.events)


@pytest.mark.parametrize(("stop", "sharded"), [(4, True), (5, False)])
def test_stop_and_resume_is_as_never_stopped(stop: int, sharded: bool) -> None:
    ladder = tuple(LoCo(bits=bits, block_size=64, reset_steps=None) for bits in (8, 4, 2))
    check_stop_and_resume(AdaQS(ladder=ladder, interval=2, factor=0.9, ewma=1.0), sharded=sharded, stop=stop)
