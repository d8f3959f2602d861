"""Every preset and option, written into one of Accelerate's files, is read back as it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from typer.testing import CliRunner

from lowbit_strategy import OUTER_RULES, PRESETS, Compressor, WeightCoding
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.cli import app
from lowbit_strategy.config_file.section import OTHER_KEYS, add_section, plugin_from_section, read_section
from lowbit_strategy.local_steps.interval import Interval
from lowbit_strategy.plan.lines import CHOICES

BASE = "# ours\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"
VALUES: dict[str, Any] = {  # of the plugin's own options: none is the default
    "seed": 7,
    "on_world_size_change": "fold",
    "on_missing_residual": "reset",
    "rollback": False,
    "max_residual": 3.0,
    "follows_rate": True,
    "check_digest": False,
    "two_level": True,
    "intra": 8,
    "shard_size": "node",
    "weights": "delta4",
    "outer": {"name": "diloco", "every": 30},
    "elastic": {"lighthouse": "http://10.0.0.1:29510"},
    "memory": 2.5,
    "far_links": True,
    "second_moment": True,
    "controller": {"name": "static", "level": "loco2"},
    "monitor": {"every_n_steps": 9},
    "record": "runs/1",
    "num_steps": 900,
    "steps_per_epoch": 30,
}


def through_a_file(section: dict[str, Any], folder: Path) -> LowBitPlugin:
    """Written by ``lowbit config``, read by ``accelerate launch``."""
    path = folder / "job.yaml"
    path.write_text(BASE)
    add_section(path, section)
    config: Any = load_config_from_file(str(path))
    assert (config.num_processes, json.loads(config.lowbit_config)) == (2, {"lowbit_config": section})
    return plugin_from_section(read_section(config.lowbit_config))


def written(value: Any) -> Any:
    """An option's value as a file has it."""
    if isinstance(value, Compressor):
        name = next(name for name, preset in PRESETS.items() if type(preset) is type(value))
        return {"compressor": name, "options": options_of(value)}
    if isinstance(value, (WeightCoding, Interval)):
        return {"name": type(value).__name__.lower().removeprefix("weight"), **options_of(value)}
    return [written(each) for each in value] if isinstance(value, tuple) else value


def options_of(value: Any) -> dict[str, Any]:
    return {field.name: written(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_each_of_its_options(name: str, tmp_path: Path) -> None:
    expected = LowBitPlugin(PRESETS[name])
    assert through_a_file({"compressor": name}, tmp_path) == expected
    assert through_a_file({"compressor": name, "options": options_of(PRESETS[name])}, tmp_path) == expected
    key, *_ = options_of(PRESETS[name])
    with pytest.raises(ValueError, match=f"unknown key '{key}x'; did you mean '{key}'"):
        through_a_file({"compressor": name, f"{key}x": 1}, tmp_path)


@pytest.mark.parametrize("name", OUTER_RULES)
def test_an_outer_rule_with_each_of_its_options(name: str, tmp_path: Path) -> None:
    section = {"outer": {"name": name, **options_of(OUTER_RULES[name])}}
    assert through_a_file(section, tmp_path).outer == OUTER_RULES[name]


@pytest.mark.parametrize("weights", CHOICES, ids=repr)
def test_a_coding_of_weights_with_each_of_its_options(weights: WeightCoding, tmp_path: Path) -> None:
    assert through_a_file({"compressor": "loco", "weights": written(weights)}, tmp_path).weights == weights


def test_every_option_of_the_plugin_is_tried() -> None:
    assert set(VALUES) == set(OTHER_KEYS)


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_an_option_of_the_plugin(key: str, tmp_path: Path) -> None:
    needed = {"outer": VALUES["outer"]} if key == "elastic" else {}
    plugin = through_a_file({"compressor": "loco", **needed, key: VALUES[key]}, tmp_path)
    changed = [field.name for field in dataclasses.fields(plugin) if getattr(plugin, field.name) != field.default]
    assert {key} <= set(changed) <= {key, "compressor", *needed}
    with pytest.raises(ValueError, match=f"unknown key '{key}s'; did you mean '{key}'"):
        through_a_file({"compressor": "loco", f"{key}s": VALUES[key]}, tmp_path)


def test_a_section_may_name_every_preset(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for name in PRESETS:
        path.write_text(BASE)
        section = f"{{compressor: {name}, seed: 3}}"
        result = CliRunner().invoke(app, ["config", "--config-file", str(path), "--lowbit_config", section])
        assert result.exit_code == 0, result.output
        assert yaml.safe_load(path.read_text())["lowbit_config"] == {"compressor": name, "seed": 3}
