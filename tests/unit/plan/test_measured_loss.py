"""The losses that `lowbit advise` shows are those of `benchmarks/results`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from lowbit_strategy.plan.measured_loss import LOSSES, quality_of, worst_loss

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
VARIANTS = {"bf16": 'dense {"dtype":"bfloat16"}', "powersgd": 'powersgd {"rank":2}'}


def runs(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    return found


@pytest.mark.parametrize("name", LOSSES)
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


def test_labels_follow() -> None:
    assert quality_of("loco", 4) == "same"
    assert quality_of("bf16", 16) == "same"
    assert quality_of("loco1", 1) == "close"
    assert quality_of("powersgd", 1) == "worse"
    assert quality_of("somebody's", 8) == "unmeasured"
    loss = worst_loss("powersgd")
    assert loss is not None
    assert str(loss) == "+3.8"
