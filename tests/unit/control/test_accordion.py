"""Accordion: critical regimes of known place and length are found within one interval, and nothing else is."""

from __future__ import annotations

import math

import pytest

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control import Accordion, Progress
from lowbit_strategy.control.accordion import CriticalRegimes
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import preset
from testing.controllers import matrices, run

LIGHT, HEAVY = LoCo(bits=8), LoCo(bits=2)
INTERVAL = 10
# Windows (of one interval) in which a parameter's gradient norm moves by 60 % a window; elsewhere it drifts by 5 %.
REGIMES = {"a": {3, 4, 9}, "b": {14}, "c": set()}
NUM_WINDOWS = 20


def norms_by_window(critical: set[int]) -> list[float]:
    """Norm of the gradient accumulated over each window."""
    norm, norms = 100.0, []
    for window in range(NUM_WINDOWS):
        norm *= 0.4 if window in critical else (0.95 if window % 2 else 1.05)
        norms.append(norm)
    return norms


SERIES = {name: norms_by_window(critical) for name, critical in REGIMES.items()}


def progresses(num_steps: int, **options: float) -> list[Progress]:
    return [Progress(step=step, epoch=step // 5, **options) for step in range(num_steps)]


def window_closed_at(progress: Progress) -> dict[str, float]:
    return {name: series[progress.step // INTERVAL - 1] for name, series in SERIES.items()}


@pytest.mark.parametrize("gradient", ["local", "mean"])
def test_detects_every_regime_within_an_interval_and_nothing_else(gradient: str) -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps", gradient=gradient)
    decisions = run(controller, matrices("a", "b", "c"), progresses(NUM_WINDOWS * INTERVAL), norms=window_closed_at)
    for name, critical in REGIMES.items():
        for step, decision in enumerate(decisions):
            window = step // INTERVAL  # decided by the window that closed when this one opened
            light = window <= 1 or window - 1 in critical
            assert decision.levels[name] == (0 if light else 1), (name, step)
    assert all(decision.probe.accumulate == gradient for decision in decisions)


def test_as_published_in_epochs() -> None:
    """Windows are whole epochs, one in `interval`; light until two of them can be compared."""
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=4)
    norm_of_epoch = {0: 10.0, 4: 9.0, 8: 4.0, 12: 4.1}
    all_progresses = [Progress(step=3 * epoch + at, epoch=epoch) for epoch in range(16) for at in range(3)]
    decisions = run(
        controller, matrices("a"), all_progresses, norms=lambda progress: {"a": norm_of_epoch[progress.epoch - 1]}
    )
    for progress, decision in zip(all_progresses, decisions, strict=True):
        light = progress.epoch <= 4 or 9 <= progress.epoch <= 12
        assert decision.levels["a"] == (0 if light else 1), progress
        assert (decision.probe.accumulate is not None) == (progress.epoch % 4 == 0)


def test_light_at_once_when_the_learning_rate_falls_until_the_next_detection() -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps")
    all_progresses = [Progress(step=step, learning_rate=0.1 if step < 33 else 0.01) for step in range(60)]
    decisions = run(controller, matrices("a"), all_progresses, norms=lambda progress: {"a": 1.0})
    light = [step for step, decision in enumerate(decisions) if decision.levels["a"] == 0]
    assert light == [*range(20), *range(33, 40)]
    assert "learning rate fell from 0.1 to 0.01" in decisions[33].switches[0].reason


def test_a_smooth_schedule_and_a_warm_up_are_no_decay() -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps")
    rates = [min(step + 1, 10) / 10 * (1 + math.cos(math.pi * step / 400)) for step in range(200)]
    all_progresses = [Progress(step=step, learning_rate=rate) for step, rate in enumerate(rates)]
    decisions = run(controller, matrices("a"), all_progresses, norms=lambda progress: {"a": 1.0})
    assert all(decision.levels["a"] == 1 for decision in decisions[20:])


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_norm_without_ratio_is_light(bad: float) -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps")
    decisions = run(
        controller, matrices("a"), progresses(40), norms=lambda progress: {"a": bad if progress.step == 20 else 1.0}
    )
    assert [decisions[step].levels["a"] for step in (15, 25, 35)] == [0, 0, 0]


def test_whole_model_is_judged_by_its_total_norm() -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps", per="model")
    # `b` changes a lot but is a small part of the whole.
    series = {0: (10.0, 1.0), 1: (10.0, 0.1), 2: (2.0, 0.1)}
    decisions = run(
        controller,
        matrices("a", "b"),
        progresses(40),
        norms=lambda progress: dict(zip("ab", series[progress.step // INTERVAL - 1], strict=True)),
    )
    assert [decisions[step].levels for step in (15, 25, 35)] == [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 0, "b": 0}]
    assert decisions[20].switches[0].what == "all parameters"


def test_parameters_that_switch_together_are_one_line() -> None:
    """Each has a ratio of its own, and a line of its own would bury all others."""
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps")
    decisions = run(
        controller,
        matrices(*"abcd"),
        progresses(25),
        norms=lambda progress: {name: 1.0 + 0.01 * at * progress.step for at, name in enumerate("abcd")},
    )
    assert [switch.what for switch in decisions[20].switches] == ["all parameters"]


def test_vectors_follow_no_detection() -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps")
    specs = [*matrices("a"), TensorSpec("bias", (64,))]
    decisions = run(controller, specs, progresses(40), norms=lambda progress: {"a": 1.0, "bias": 1.0})
    assert decisions[-1].levels == {"a": 1, "bias": 0}


def test_a_restart_changes_nothing() -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, interval=INTERVAL, unit="steps")
    arguments = (controller, matrices("a", "b", "c"), progresses(NUM_WINDOWS * INTERVAL))
    assert run(*arguments, norms=window_closed_at, restart_at=47) == run(*arguments, norms=window_closed_at)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"light": HEAVY, "heavy": LIGHT}, "swap them"),
        ({"light": LIGHT, "heavy": LIGHT}, "must compress more"),
        ({"interval": 0}, "interval must be a positive integer"),
        ({"eta": 0.0}, "eta must be positive"),
        ({"unit": "hours"}, "unit must be"),
        ({"per": "layer"}, "per must be"),
        ({"gradient": "global"}, "gradient must be"),
        ({"learning_rate_drop": 1.5}, "learning_rate_drop"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Accordion(**{"light": LIGHT, "heavy": HEAVY, **options})


def test_levels_may_be_names_of_presets() -> None:
    by_name = Accordion(light="loco", heavy="loco2")  # type: ignore[arg-type]
    assert by_name == Accordion(light=preset("loco"), heavy=preset("loco2"))
    with pytest.raises(ValueError, match="unknown compressor 'loco5'; did you mean 'loco"):
        Accordion(light="loco5", heavy="loco2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"heavy must be a compressor such as LoCo\(.* got 2"):
        Accordion(light="loco", heavy=2)  # type: ignore[arg-type]


def test_first_window_is_critical() -> None:
    regimes = CriticalRegimes(eta=0.5, interval=1, unit="steps", learning_rate_drop=0.1, gradient="local")
    assert not regimes.reads_accumulated(Progress(step=0), regimes.first_state([]))


def test_epochs_that_nothing_counts_are_asked_for() -> None:
    assert CriticalRegimes(interval=2).window(Progress(step=0, epoch=0)) == 0
    assert CriticalRegimes(unit="steps").window(Progress(step=10)) == 1
    with pytest.raises(ValueError, match="nothing counts them here: count in steps, or give steps_per_epoch"):
        CriticalRegimes().window(Progress(step=0))
