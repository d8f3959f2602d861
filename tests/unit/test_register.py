"""Names of strategies: those that Lightning has for its own ddp, and advice for those that do not exist."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lowbit_strategy import PRESETS, LoCo
from lowbit_strategy.register import strategy_names

REGISTRIES = (StrategyRegistry, STRATEGY_REGISTRY)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_every_name_that_ddp_has_exists_for_every_compressor(registry: Any) -> None:
    stock = {name for name in registry if name == "ddp" or name.startswith("ddp_")}
    assert "ddp_notebook" in stock
    for compressor in PRESETS:
        assert {f"{compressor}_{name}" for name in stock} <= set(registry)
    assert {name for name, *_ in strategy_names()} <= set(registry)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_names_choose_the_start_method_and_unused_parameters(registry: Any) -> None:
    notebook = registry.get("loco_ddp_notebook")
    assert notebook._start_method == "fork"
    unused = registry.get("loco2_ddp_find_unused_parameters_true")
    assert unused._ddp_kwargs["find_unused_parameters"] is True
    assert unused.compressor == PRESETS["loco2"]
    spawned = registry.get("loco_ddp_spawn_find_unused_parameters_true")
    assert (spawned._start_method, spawned._ddp_kwargs["find_unused_parameters"]) == ("spawn", True)
    assert spawned.compressor == LoCo()


@pytest.mark.parametrize("make", [L.Trainer, L.Fabric])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("loco", "there is no strategy 'loco', loco is a compressor: use loco_ddp, loco_fsdp or loco_hsdp"),
        ("LoCo2", "there is no strategy 'loco2', loco2 is a compressor: use loco2_ddp, loco2_fsdp or loco2_hsdp"),
        ("loco_fdsp", "there is no strategy 'loco_fdsp'; did you mean 'loco_fsdp'?"),
        ("lcoo_ddp", "there is no strategy 'lcoo_ddp'; did you mean 'loco_ddp'?"),
    ],
)
def test_a_warning_has_the_nearest_name(make: Any, name: str, advice: str) -> None:
    with (
        pytest.warns(UserWarning, match=re.escape(advice)),
        pytest.raises(ValueError, match="You selected an invalid strategy name"),
    ):
        make(strategy=name, accelerator="cpu", devices=1)


def test_looking_for_a_name_is_no_error() -> None:
    names = StrategyRegistry.available_strategies()
    assert "loco_ddp" in names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "deepsped" not in names  # not ours to answer
    with pytest.warns(UserWarning, match="did you mean"):
        assert "loco_fdsp" not in names
