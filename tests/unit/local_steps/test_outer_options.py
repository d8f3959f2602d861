"""Rules of local steps as they are written: fragments, options out of range, names, bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit_strategy import (
    DGC,
    OUTER_RULES,
    AdaComm,
    DiLoCo,
    EagerDiLoCo,
    ExDyna,
    OverlapLocalSGD,
)
from lowbit_strategy.attach.prepare import settings_of
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.doctor.dry_run import Planned, plan
from lowbit_strategy.local_steps.cutting import cut_into
from lowbit_strategy.local_steps.published import as_outer
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.register import strategy_arguments
from recipes.gpt import GPT

CPU = torch.device("cpu")


def test_fragments_are_of_about_the_same_size() -> None:
    specs = [TensorSpec(str(at), (at % 7 + 1, 100)) for at in range(40)]
    parts = cut_into(specs, 4)
    assert [spec for part in parts for spec in part] == specs
    sizes = [sum(spec.numel for spec in part) for part in parts]
    assert max(sizes) < 1.2 * sum(sizes) / 4
    assert len(cut_into(specs[:2], 4)) == 2


def test_a_method_of_the_whole_model_is_not_cut_into_fragments() -> None:
    with pytest.raises(ValueError, match="looks at the whole model at once, and fragments=2"):
        DiLoCo(fragments=2).check(assign_all(ExDyna(), [TensorSpec("w", (64, 64))]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": 0}, "every must be a positive integer"),
        ({"every": 3, "fragments": 4}, "every must be at least fragments, 4"),
        ({"every": 12, "fragments": 4, "delay": 4}, "delay must be 0 to 3"),
        ({"mix": 1.0}, "mix must be in"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"synchronous": -1}, "synchronous must be a number of steps"),
        ({"synchronous_compressor": DGC(momentum=0.9)}, "must not apply its own momentum, got dgc"),
    ],
)
def test_options_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiLoCo(**wrong)


@pytest.mark.parametrize("wrong", [{"delay": 1}, {"mix": 0.5}])
def test_eager_updates_take_no_delay(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be 0"):
        EagerDiLoCo(**wrong)


def test_rounds_that_follow_the_loss_have_a_length() -> None:
    with pytest.raises(ValueError, match="start must be at least minimum, 4, got 3"):
        AdaComm(start=3)


def test_overlap_takes_no_delay() -> None:
    with pytest.raises(ValueError, match="delay must be 0"):
        OverlapLocalSGD(delay=3)


def test_overlap_keeps_a_share_of_the_own_weights() -> None:
    with pytest.raises(ValueError, match=r"mix must be in \(0, 1\)"):
        OverlapLocalSGD(mix=0.0)


@pytest.mark.parametrize(("name", "bits"), [("diloco", 0.3), ("streamingdiloco", 0.16), ("sparseloco", 0.06)])
def test_bits_per_parameter_and_step(name: str, bits: float) -> None:
    """Of a transformer with 9.7 million parameters on four ranks, as the report has it."""
    with torch.device("meta"):
        model = GPT(width=256, depth=12, heads=4, context=128)
    numel = sum(param.numel() for param in model.parameters())
    report = plan(
        model,
        OUTER_RULES[name].compressor(),
        Planned(world_size=4, scatter=False),
        device=CPU,
        options=SyncOptions(outer=OUTER_RULES[name]),
    )
    assert 8 * report.plan.sent_nbytes / report.plan.every / numel < bits
    assert "per round of 30 steps" in report.render()


def test_ranks_compare_what_a_rule_is_made_of() -> None:
    ours, theirs = (settings_of(SyncOptions(outer=DiLoCo(every=every))) for every in (3, 4))
    assert [name for name in ours if ours[name] != theirs[name]] == ["outer.every"]


def test_a_rule_has_the_same_compressor_by_every_name() -> None:
    for name, rule in OUTER_RULES.items():
        assert as_outer(name).compressor() == as_outer({"name": name}).compressor() == by_strategy(name)
        assert as_outer(name).name == rule.name == name


def by_strategy(name: str) -> Compressor:
    return SyncOptions(**strategy_arguments(name)).default_compressor
