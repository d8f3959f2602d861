"""Every study of loss trains as written: a few steps of each, so that it can be repeated when the package changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    constant_gradient,
    entropy_coding,
    large_model,
    levels,
    low_bits,
    outer_steps,
    quality,
    second_moment,
    selection,
    weights,
)

SHORT: dict[str, Any] = {"steps": 3, "warmup_steps": 1}
SMALL = quality.Setting(width=32, depth=1, context=16, batch=2, **SHORT)
LARGE = large_model.Setting(width=32, depth=1, heads=2, context=16, batch=2, windows=16, record_every=1, **SHORT)
ROUNDS = outer_steps.Setting(batch=2, context=16, validation_windows=64, **SHORT)
MOMENT = second_moment.Setting(evaluate_every=1, windows=16, **SHORT)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_quality(layout: quality.Layout) -> None:
    run = quality.train("loco", quality.parse("loco"), layout, 0, SMALL)
    assert math.isfinite(run.validation_loss)
    assert run.bits_per_element > 0


@pytest.mark.parametrize("coding", weights.VARIANTS)
def test_weights(coding: str) -> None:
    setting = weights.Setting(width=16, depth=1, context=16, batch=2, validation_windows=16, **SHORT)
    run = weights.train("transformer", "loco", coding, 0, setting)
    assert math.isfinite(run.validation_loss)
    assert run.weight_bits > 0


@pytest.mark.parametrize("variant", outer_steps.VARIANTS)
@pytest.mark.parametrize("model", outer_steps.MODELS)
def test_outer_steps(model: str, variant: str) -> None:
    found = outer_steps.train(model, outer_steps.VARIANTS[variant], 1e-3, 0, ROUNDS)
    assert math.isfinite(found["validation_loss"])


@pytest.mark.parametrize(("variant", "correction"), second_moment.CASES)
def test_second_moment(variant: str, correction: second_moment.Correction) -> None:
    run = second_moment.train("mixer", 1.0, variant, correction, 0, MOMENT)
    assert len(run.losses) == 3
    assert math.isfinite(run.losses[-1])


@pytest.mark.parametrize("variant", levels.VARIANTS)
def test_levels(variant: str) -> None:
    run = levels.train("recurrent", variant, 0, levels.Setting(validation_windows=16, **SHORT))
    assert math.isfinite(run.validation_loss)


def test_low_bits() -> None:
    run = low_bits.Trainer("mixer", low_bits.Setting(compiled=False, **SHORT)).train("loco2", "fsdp", 0)
    assert math.isfinite(run.validation_loss)


@pytest.mark.parametrize("case", large_model.CASES)
def test_large_model(case: str) -> None:
    run = large_model.train(case, 0, LARGE)
    assert len(run.validation) == 3
    assert math.isfinite(run.validation[-1])


def test_large_model_begins_alike() -> None:
    """The loss of the first step is that of the same weights and batches, as far as weights are not coded."""
    first = {case: large_model.train(case, 0, LARGE).training[0] for case in large_model.CASES}
    for case, loss in first.items():
        assert loss == pytest.approx(first["uncompressed"], rel=1e-2 if "fsdp" in case else 1e-5), case


@pytest.mark.parametrize(
    ("main", "options"),
    [
        (constant_gradient.main, {"steps": 142}),
        (entropy_coding.main, {"steps": 2, "width": 32, "depth": 1, "mbit": 200.0, "repeats": 1}),
    ],
)
def test_measurements(main: Callable[..., None], options: dict[str, Any], tmp_path: Path) -> None:
    main(**options, json_path=tmp_path / "found.json")
    assert (tmp_path / "found.json").stat().st_size > 100


def test_selection(tmp_path: Path) -> None:
    selection.main([1 << 12], [0.01], steps=1, path=tmp_path / "found.json")
    assert (tmp_path / "found.json").stat().st_size > 100
