"""Every study of loss trains as written: a few steps of each, so that it can be repeated when the package changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import constant_gradient, large_model, low_bits, outer_steps, quality, second_moment, simulated, weights

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"steps": 3, "warmup_steps": 1}


def test_quality() -> None:
    setting = quality.Setting(width=32, depth=1, context=16, batch=2, **SHORT)
    run = quality.train("loco", simulated.parse("loco"), "ddp", 0, setting)
    assert math.isfinite(run.validation_loss)
    assert run.bits_per_element > 0


def test_weights() -> None:
    setting = weights.Setting(width=16, depth=1, context=16, batch=2, validation_windows=16, **SHORT)
    run = weights.train("transformer", "loco", "delta4", 0, setting)
    assert math.isfinite(run.validation_loss)
    assert run.weight_bits > 0


def test_outer_steps() -> None:
    setting = outer_steps.Setting(batch=2, context=16, validation_windows=64, **SHORT)
    for variant in outer_steps.VARIANTS.values():
        found = outer_steps.train("transformer", variant, 1e-3, 0, setting)
        assert math.isfinite(found["validation_loss"])


def test_second_moment() -> None:
    setting = second_moment.Setting(evaluate_every=1, windows=16, **SHORT)
    run = second_moment.train("mixer", 1.0, "loco1", "squares", 0, setting)
    assert len(run.losses) == 3
    assert math.isfinite(run.losses[-1])


def test_low_bits() -> None:
    run = low_bits.Trainer("mixer", low_bits.Setting(compiled=False, **SHORT)).train("loco2", "fsdp", 0)
    assert math.isfinite(run.validation_loss)


def test_large_model_begins_alike() -> None:
    """The loss of the first step is that of the same weights and batches, as far as weights are not coded."""
    setting = large_model.Setting(width=32, depth=1, heads=2, context=16, batch=2, windows=16, record_every=1, **SHORT)
    first = {case: large_model.train(case, 0, setting).training[0] for case in large_model.CASES}
    for case, loss in first.items():
        assert loss == pytest.approx(first["uncompressed"], rel=1e-2 if "fsdp" in case else 1e-5), case


def test_constant_gradient(tmp_path: Path) -> None:
    constant_gradient.main(steps=142, json_path=tmp_path / "found.json")
    assert (tmp_path / "found.json").stat().st_size > 100
