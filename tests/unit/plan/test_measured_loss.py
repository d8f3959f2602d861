"""The losses and steps that `lowbit advise` shows are those of `benchmarks/results`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.second_moment import Run, extra_steps
from lowbit_strategy.plan.measured_loss import LOSSES, STEPS, quality_of, steps_of, worst_loss

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
VARIANTS = {"bf16": 'dense {"dtype":"bfloat16"}', "powersgd": 'powersgd {"rank":2}'}


SECOND_MOMENTS = ("loco1*", "loco2*")


def runs(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return found


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in SECOND_MOMENTS])
def test_losses_are_those_of_the_results(name: str) -> None:
    found = runs("outer_steps_transformer" if name == "diloco" else "low_bits")
    every = [run for run in found if run.get("layout", "ddp") == "ddp"]
    for loss in LOSSES[name]:
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


def of_second_moments(file: str, name: str, rate: float) -> dict[str, list[tuple[Run, Run]]]:
    """Runs of a preset and those without compression of the same seeds, by model."""
    every = [Run(**each) for each in runs(file)]
    dense = {(run.model, run.rate, run.seed): run for run in every if run.variant == "dense"}
    correction = "squares" if name.endswith("*") else "none"
    found: dict[str, list[tuple[Run, Run]]] = {}
    for run in every:
        if (run.variant, run.correction, run.rate) == (name.removesuffix("*"), correction, rate):
            found.setdefault(run.model, []).append((run, dense[run.model, rate, run.seed]))
    return found


@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_losses_with_second_moments_are_those_of_the_results(name: str) -> None:
    found = of_second_moments("second_moment", name, 1.0)
    assert set(found) == {loss.model for loss in LOSSES[name]}
    for loss in LOSSES[name]:
        percents = [100 * (run.losses[-1] / dense.losses[-1] - 1) for run, dense in found[loss.model]]
        assert loss.seeds == len(percents)
        assert loss.percent == pytest.approx(statistics.mean(percents), abs=1e-3)
        assert loss.error == pytest.approx(statistics.stdev(percents) / len(percents) ** 0.5, abs=1e-3)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_results(name: str) -> None:
    for rate, percent in ((1.0, STEPS[name].best), (0.25, STEPS[name].quarter)):
        means = []
        for pairs in of_second_moments("second_moment", name, rate).values():
            assert len(pairs) >= 3
            more = [each for run, dense in pairs if (each := extra_steps(run, dense, 0.75)) is not None]
            assert len(more) == len(pairs)
            means.append(statistics.mean(more))
        assert len(means) == 3
        assert percent == pytest.approx(max(means), abs=0.05)


def test_more_steps_cost_time_and_fewer_are_not_counted() -> None:
    assert steps_of("loco2") == 1.06
    assert steps_of("loco1") == pytest.approx(1.208)
    assert steps_of("somebody's") == 1.0
    assert str(STEPS["loco1"]) == "+21"
    assert str(STEPS["loco2"]) == "+6"


def test_labels_follow() -> None:
    assert quality_of("loco", 4) == "same"
    assert quality_of("bf16", 16) == "same"
    assert quality_of("loco1", 1) == "close"
    assert quality_of("powersgd", 1) == "worse"
    assert quality_of("somebody's", 8) == "unmeasured"
    loss = worst_loss("powersgd")
    assert loss is not None
    assert str(loss) == "+3.8"
