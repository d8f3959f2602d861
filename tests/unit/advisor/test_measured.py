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
from lowbit_strategy.advisor.advice import MEASURED, Measured

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FILES = {"diloco": "outer_steps_transformer", "loco": "low_bits_loco4"}
RENAMED = {"loco": "loco4", "loco_uniform": "loco"}  # since they were measured
VARIANTS = RENAMED | {"powersgd": 'powersgd {"rank":2}'}
CASES = RENAMED | {"diloco": "diloco, as published", "loco1*": "loco1, second moment"}
RATES = (1.0, 0.25)
SMALL = ("mixer", "recurrent", "lstm")  # of less than 1.3 million parameters
LENGTHS = ("", "_320_steps", "_500_steps")


def runs(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return found


def losses_of(name: str) -> dict[str, list[float]]:
    """Per cent by which validation losses are higher than without compression, of each seed, by model."""
    found: dict[str, list[float]] = {}
    if name.endswith("*"):
        for model, pairs in of_second_moments("second_moment", name, 1.0).items():
            found[model] = [100 * (run.losses[-1] / dense.losses[-1] - 1) for run, dense in pairs]
    else:
        every = [run for run in runs(FILES.get(name, "low_bits")) if run.get("layout", "ddp") == "ddp"]
        dense = {(run["model"], run["seed"]): run["validation_loss"] for run in every if run["variant"] == "dense"}
        for run in every:
            if run["variant"] == VARIANTS.get(name, name):
                loss = run["validation_loss"] / dense[run["model"], run["seed"]]
                found.setdefault(run["model"], []).append(100 * (loss - 1))
    large = {(run["case"], run["seed"]): run["validation"][-1] for run in runs("large_model")}
    gpt = [
        100 * (loss / large["uncompressed", seed] - 1)
        for (case, seed), loss in large.items()
        if case == CASES.get(name, name)
    ]
    return found | ({"gpt": gpt} if gpt else {})


@pytest.mark.parametrize("name", MEASURED)
def test_losses_and_labels_are_those_of_the_results(name: str) -> None:
    found = losses_of(name)
    means = {model: statistics.mean(percents) for model, percents in found.items()}
    errors = {
        model: statistics.stdev(percents) / len(percents) ** 0.5 if len(percents) > 1 else 0.0
        for model, percents in found.items()
    }
    worst = max(means, key=lambda model: means[model])
    assert MEASURED[name].loss == pytest.approx(means[worst], abs=1e-3)
    assert MEASURED[name].error == pytest.approx(errors[worst], abs=1e-3)
    if name == "diloco":
        assert MEASURED[name].quality == "local"
    elif name == "loco" and all(means[model] <= 2 * errors[model] for model in means):
        assert MEASURED[name].quality == "same"
    else:
        assert MEASURED[name].quality == ("close" if means[worst] <= 0.5 else "worse")


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


@pytest.mark.parametrize("name", [name for name, each in MEASURED.items() if each.steps is not None])
def test_steps_are_those_of_the_results(name: str) -> None:
    """The most that are needed: at a constant rate, to the loss that uncompressed training has after three quarters of
    its run; and with a cosine to zero, of a whole run whose schedule is as much longer, to the last loss.
    """
    files = ("second_moment_decay", "second_moment_gpt")
    lengths = [read_runs(RESULTS / f"{file}{which}.json") for file in files for which in LENGTHS]
    slopes = {(model, rate): learning_curve(lengths, model, rate) for model in (*SMALL, "gpt") for rate in RATES}

    def longer(run: Run, dense: Run) -> float:
        slope = slopes[run.model, run.rate]
        assert slope is not None
        return longer_run(run, dense, slope)

    constant = worst_mean(["second_moment"], name, lambda run, dense: extra_steps(run, dense, 0.75))
    assert MEASURED[name].steps == pytest.approx(max(constant, worst_mean(files, name, longer)), abs=0.05)


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
    assert MEASURED["loco1"].times == pytest.approx(1.208)
    assert MEASURED["powersgd"].times == 1.0
    assert Measured("same", 0.0, 0.0, -3.0).times == 1.0
