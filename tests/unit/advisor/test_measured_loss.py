"""The losses and steps that `lowbit advise` shows are those of `benchmarks/results`."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import Runs
from benchmarks.second_moment import Run, Setting, extra_steps, learning_curve, longer_run, read_runs
from lowbit_strategy.advisor.measured_loss import LOSSES, STEPS, Loss, quality_of, steps_of, worst_loss

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FILES = {"diloco": "outer_steps_transformer", "loco": "low_bits_loco4"}
RENAMED = {"loco": "loco4", "loco_uniform": "loco"}  # since they were measured
VARIANTS = RENAMED | {"bf16": 'dense {"dtype":"bfloat16"}', "powersgd": 'powersgd {"rank":2}'}
RATES = (1.0, 0.25)
SECOND_MOMENTS = ("loco1*", "loco2*")
SMALL = ("mixer", "recurrent", "lstm")  # of less than 1.3 million parameters
LENGTHS = ("", "_320_steps", "_500_steps")


def runs(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return found


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in SECOND_MOMENTS])
def test_losses_are_those_of_the_results(name: str) -> None:
    found = runs(FILES.get(name, "low_bits"))
    every = [run for run in found if run.get("layout", "ddp") == "ddp"]
    for loss in small_models(name):
        by_variant = [
            {
                run["seed"]: run["validation_loss"]
                for run in every
                if (run["model"], run["variant"]) == (loss.model, each)
            }
            for each in ("dense", VARIANTS.get(name, name))
        ]
        dense, ours = by_variant
        percents = [100 * (ours[seed] / dense[seed] - 1) for seed in ours]
        assert loss.seeds == len(percents)
        assert loss.percent == pytest.approx(statistics.mean(percents), abs=1e-3)
        if loss.error is None:
            assert len(percents) == 1
        else:
            assert loss.error == pytest.approx(statistics.stdev(percents) / len(percents) ** 0.5, abs=1e-3)


def small_models(name: str) -> list[Loss]:
    return [loss for loss in LOSSES[name] if loss.model != "gpt"]


CASES = RENAMED | {"diloco": "diloco, as published", "loco1*": "loco1, second moment"}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_larger_model_are_those_of_the_results(name: str) -> None:
    losses = {(run["case"], run["seed"]): run["validation"][-1] for run in runs("large_model")}
    case = CASES.get(name, name)
    percents = [
        100 * (loss / losses["uncompressed", seed] - 1) for (each, seed), loss in losses.items() if each == case
    ]
    found = [loss for loss in LOSSES[name] if loss.model == "gpt"]
    assert len(found) == bool(percents)
    for loss in found:
        assert loss.seeds == len(percents) == 3
        assert loss.percent == pytest.approx(statistics.mean(percents), abs=1e-3)
        assert loss.error == pytest.approx(statistics.stdev(percents) / len(percents) ** 0.5, abs=1e-3)


def of_second_moments(file: str, name: str, rate: float) -> dict[str, list[tuple[Run, Run]]]:
    """Runs of a preset and those without compression of the same seeds, by model."""
    every = [Run(**each) for each in runs(file)]
    dense = {(run.model, run.rate, run.seed): run for run in every if run.variant == "dense"}
    correction, variant = "squares" if name.endswith("*") else "none", name.removesuffix("*")
    found: dict[str, list[tuple[Run, Run]]] = {}
    for run in every:
        if (run.variant, run.correction, run.rate) == (RENAMED.get(variant, variant), correction, rate):
            found.setdefault(run.model, []).append((run, dense[run.model, rate, run.seed]))
    return found


@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_losses_with_second_moments_are_those_of_the_results(name: str) -> None:
    found = of_second_moments("second_moment", name, 1.0)
    assert set(found) == {loss.model for loss in small_models(name)}
    for loss in small_models(name):
        percents = [100 * (run.losses[-1] / dense.losses[-1] - 1) for run, dense in found[loss.model]]
        assert loss.seeds == len(percents)
        assert loss.percent == pytest.approx(statistics.mean(percents), abs=1e-3)
        assert loss.error == pytest.approx(statistics.stdev(percents) / len(percents) ** 0.5, abs=1e-3)


def worst_mean(files: Sequence[str], name: str, percent_of: Callable[[Run, Run], float | None]) -> float:
    """Of the models and of both rates, means of three seeds and more."""
    means = {}
    for file, rate in itertools.product(files, RATES):
        for model, pairs in of_second_moments(file, name, rate).items():
            percents = [each for run, dense in pairs if (each := percent_of(run, dense)) is not None]
            assert len(percents) == len(pairs) >= 3
            means[model, rate] = statistics.mean(percents)
    assert {(model, rate) for model in SMALL for rate in RATES} <= means.keys()
    return max(means.values())


@pytest.mark.parametrize("name", STEPS)
def test_steps_at_a_constant_rate_are_those_of_the_results(name: str) -> None:
    worst = worst_mean(["second_moment"], name, lambda run, dense: extra_steps(run, dense, 0.75))
    assert STEPS[name].constant == pytest.approx(worst, abs=0.05)


@pytest.mark.parametrize("name", STEPS)
def test_steps_with_a_falling_rate_are_those_of_the_results(name: str) -> None:
    files = ("second_moment_decay", "second_moment_gpt")
    lengths = [read_runs(RESULTS / f"{file}{which}.json") for file in files for which in LENGTHS]
    slopes = {(model, rate): learning_curve(lengths, model, rate) for model in (*SMALL, "gpt") for rate in RATES}

    def longer(run: Run, dense: Run) -> float:
        slope = slopes[run.model, run.rate]
        assert slope is not None
        return longer_run(run, dense, slope)

    assert STEPS[name].decaying == pytest.approx(worst_mean(files, name, longer), abs=0.05)


def test_a_loss_that_falls_as_a_power_of_the_steps() -> None:
    def whole(steps: int, seed: int) -> Runs[Run]:
        runs = Runs(None, Setting(steps=steps, decays=True), Run)
        loss = (1 + seed) * (steps / 400) ** -0.25
        runs.add(Run(model="m", rate=1.0, variant="dense", correction="none", seed=seed, losses=[loss], energy_ratio=1))
        return runs

    lengths = [whole(steps, seed) for steps, seed in ((400, 0), (500, 0), (320, 1), (400, 1))]
    slope = learning_curve(lengths, "m", 1.0)
    assert slope == pytest.approx(-0.25)
    dense = lengths[0].runs[0]
    assert longer_run(replace(dense, losses=[1.0]), dense, -0.25) == 0.0
    assert longer_run(replace(dense, losses=[1.1**0.25]), dense, -0.25) == pytest.approx(10)
    assert learning_curve(lengths[:1], "m", 1.0) is None
    assert learning_curve(lengths, "m", 2.0) is None


def test_more_steps_cost_time_and_fewer_are_not_counted() -> None:
    assert steps_of("loco2") == pytest.approx(1.069)
    assert steps_of("loco1") == pytest.approx(1.208)
    assert steps_of("somebody's") == 1.0
    assert str(STEPS["loco1"]) == "+21"
    assert str(STEPS["loco2"]) == "+7"


def test_labels_follow() -> None:
    assert quality_of("loco", 4) == "same"
    assert quality_of("loco_uniform", 4) == "same"
    assert quality_of("bf16", 16) == "same"
    assert quality_of("loco1", 1) == "close"
    assert quality_of("powersgd", 1) == "worse"
    assert quality_of("somebody's", 8) == "unmeasured"
    loss = worst_loss("powersgd")
    assert loss is not None
    assert str(loss) == "+11.4±0.7"
