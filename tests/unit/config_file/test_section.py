"""The ``lowbit_config`` section: what it becomes, and the errors about one that is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowbit_strategy import PRESETS, ChunkTopK, Dense, DiLoCo, LocalSGD, LoCo, Partition, Quadratic, WarmUp
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.config_file.section import (
    OTHER_KEYS,
    VARIABLE,
    export,
    plugin_from_section,
    read_config,
    read_section,
)


def test_compressor_options_and_the_plugin_s_own_stand_beside_each_other() -> None:
    section = {"compressor": "loco", "bits": 3, "exempt": ["@vector"], "seed": 5, "on_world_size_change": "fold"}
    plugin = plugin_from_section(section)
    assert plugin == LowBitPlugin(LoCo(bits=3, exempt=("@vector",)), seed=5, on_world_size_change="fold")


def test_numbers_that_yaml_reads_as_text() -> None:
    section = {"compressor": "loco", "beta": "5e-1", "exempt": ["1e5"], "record": "2e6"}
    assert plugin_from_section(section) == LowBitPlugin(LoCo(beta=0.5, exempt=("1e5",)), record="2e6")
    with pytest.raises(ValueError, match=r"beta must be a number, got '0\.5'"):  # quoted: YAML reads 0.5 as a number
        plugin_from_section({"compressor": "loco", "beta": "0.5"})


@pytest.mark.parametrize("name", ["loco", "LoCo", "LOCO"])
def test_the_case_of_a_name_does_not_count(name: str) -> None:
    assert plugin_from_section({"compressor": name, "bits": 8}).compressor == LoCo(bits=8)


def test_several_faults_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"lowbit_config.seed must be an integer.*lowbit_config.num_steps must be"):
        plugin_from_section({"compressor": "loco", "seed": "abc", "num_steps": "many"})


def test_rules_of_a_partition() -> None:
    rules = [["@head", {"compressor": "loco", "bits": 8}], ["*.gate", "dense"]]
    expected = Partition(rules=(("@head", LoCo(bits=8)), ("*.gate", Dense())))
    assert plugin_from_section({"compressor": "partition", "rules": rules}).compressor == expected


def test_a_configuration_inside_a_configuration() -> None:
    inner = {"compressor": "loco", "bits": 3}
    section = {"compressor": "warmup", "options": {"compressor": inner, "first": "dense", "steps": 7}}
    assert plugin_from_section(section).compressor == WarmUp(compressor=LoCo(bits=3), first=Dense(), steps=7)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"compressor": "loca"}, r"unknown compressor 'loca'; did you mean 'loco'\?"),
        ({"compressor": "loco", "bit": 4}, r"unknown key 'bit'; did you mean 'bits'\?"),
        ({"compressor": "loco", "on_world_size_chang": "fold"}, r"did you mean 'on_world_size_change'\?"),
        ({"compressor": "loco", "bits": 40}, "bits must be an integer from 2 to 8 with codebook='uniform', got 40"),
        ({"compressor": "loco", "bits": "four"}, "bits must be an integer, got 'four'"),
        ({"compressor": "loco", "beta": "much"}, "lowbit_config: beta must be a number, got 'much'"),
        (
            {"compressor": "loco", "exempt": "@vector"},
            "exempt must be a list, each element a string or a function, got '@",
        ),
        ({"compressor": "loco", "exempt": ["@vectors"]}, r"did you mean '@vector'\?"),
        ({"compressor": "loco", "on_missing_residual": "ignore"}, "on_missing_residual must be"),
        ({"compressor": "warmup", "options": {"step": 3}}, r"did you mean 'steps'\?"),
        ({"compressor": "warmup", "options": 3}, "options must be a mapping"),
        ({"bits": 4}, "compressor is missing"),
        ({"compressor": 4}, "compressor must be a name such as loco, got 4"),
        ("loco", "must be a mapping"),
        (None, "must be a mapping"),
    ],
)
def test_what_is_wrong_is_named(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin_from_section(section)


def test_no_option_of_a_compressor_is_called_like_one_of_the_plugin() -> None:
    for name, compressor in PRESETS.items():
        options = {field.name for field in dataclasses.fields(compressor)}
        assert not options & {*OTHER_KEYS, "options"}, name


@pytest.mark.parametrize(
    "text",
    ["distributed_type: NO\nlowbit_config: {compressor: loco, bits: 4}\n", "compressor: loco\nbits: 4\n"],
)
def test_a_file_holds_the_section_or_is_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert read_section(path) == {"compressor": "loco", "bits": 4}


def test_the_section_as_text() -> None:
    assert read_section("{compressor: loco, bits: 4}") == {"compressor": "loco", "bits": 4}
    assert read_section('{"lowbit_config": {"compressor": "loco"}}') == {"compressor": "loco"}


def test_a_file_without_the_section(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("distributed_type: MULTI_GPU\n")
    with pytest.raises(ValueError, match="has no lowbit_config section: add lowbit_config"):
        read_section(path)
    with pytest.raises(ValueError, match="there is no file"):
        read_section(tmp_path / "missing.yaml")


def test_through_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = {"compressor": "loco", "exempt": ["@vector", "*.gate.*"]}
    monkeypatch.setenv(VARIABLE, "")  # as before afterwards
    export(section)
    assert read_section(os.environ[VARIABLE]) == section
    (tmp_path / "job.json").write_text(json.dumps({"lowbit_config": section}))
    assert read_section(tmp_path / "job.json") == section
    with pytest.raises(ValueError, match="unknown compressor 'loca'"):
        export({"compressor": "loca"})
    assert read_section(os.environ[VARIABLE]) == section


def test_the_plugin_checks_what_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"compressor must be a compressor such as .*seed must be an integer"):
        LowBitPlugin(4, seed="3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_world_size_change must be"):
        LowBitPlugin(on_world_size_change="drop")  # type: ignore[arg-type]


def test_local_steps_in_a_section() -> None:
    plugin = plugin_from_section({"compressor": "loco", "outer": {"name": "diloco", "every": 50, "lr": "9e-1"}})
    assert plugin.outer == DiLoCo(every=50, lr=0.9)
    alone = plugin_from_section({"outer": "sparseloco"})
    assert isinstance(alone.compressor, ChunkTopK)
    growing = plugin_from_section({"outer": {"name": "localsgd", "every": {"name": "quadratic", "alpha": 0.02}}})
    assert growing.outer == LocalSGD(every=Quadratic(alpha=0.02))
    with pytest.raises(ValueError, match=r"lowbit_config\.outer: unknown outer rule 'dilco'; did you mean 'diloco'"):
        plugin_from_section({"compressor": "loco", "outer": "dilco"})
    with pytest.raises(ValueError, match=r"lowbit_config\.outer: unknown key 'evry'; did you mean 'every'"):
        plugin_from_section({"compressor": "loco", "outer": {"name": "diloco", "evry": 3}})


def test_keys_that_an_error_names_are_keys_that_are_taken() -> None:
    with pytest.raises(ValueError, match="Known with loco") as error:
        plugin_from_section({"compressor": "loco", "rollbak": True})
    assert "rollback" in str(error.value)
    assert plugin_from_section({"compressor": "loco", "rollback": False}).rollback is False


@pytest.mark.parametrize("read", [read_config, read_section])
@pytest.mark.parametrize("content", [b"a: [1\nb: {\n", b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(read: Callable[[Path], object], content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises((ValueError, yaml.YAMLError), match=r"job\.yaml"):
        read(path)


@pytest.mark.parametrize("content", ["", "- 1\n"])
def test_a_configuration_is_a_mapping(content: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"job\.yaml is not a configuration file of Accelerate: it must be a mapping"):
        read_config(tmp_path / "job.yaml")
