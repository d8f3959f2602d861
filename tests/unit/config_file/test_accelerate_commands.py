"""Accelerate's commands on files with a section: they read it, show it and keep it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.update import update_config
from accelerate.commands.env import env_command

SECTION: dict[str, Any] = {"compressor": "loco", "bits": 3, "exempt": ["@vector"], "outer": {"name": "diloco"}}
JOB = {"distributed_type": "MULTI_GPU", "num_processes": 2, "lowbit_config": SECTION}


def write(folder: Path, suffix: str, config: dict[str, Any]) -> str:
    path = folder / f"job.{suffix}"
    path.write_text(json.dumps(config) if suffix == "json" else yaml.safe_dump(config, sort_keys=False))
    return str(path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_an_update_keeps_the_section(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, JOB)
    update_config(argparse.Namespace(config_file=path))
    updated = yaml.safe_load(Path(path).read_text())
    assert updated["lowbit_config"] == SECTION
    assert updated["num_machines"] == 1  # Accelerate's default, which the update adds
    assert load_config_from_file(path).to_dict() == updated


def test_env_shows_the_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env_command(argparse.Namespace(config_file=write(tmp_path, "yaml", JOB)))
    assert f"- lowbit_config: {SECTION}" in capsys.readouterr().out


def test_a_file_without_a_section_is_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, "yaml", {key: value for key, value in JOB.items() if key != "lowbit_config"})
    update_config(argparse.Namespace(config_file=path))
    assert "lowbit_config" not in yaml.safe_load(Path(path).read_text())
