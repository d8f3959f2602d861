"""``lowbit config``: a section becomes part of a file that ``accelerate launch`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.default import write_basic_config
from typer.testing import CliRunner

from lowbit_strategy.cli import app

BASE = "# ours\ndistributed_type: MULTI_GPU\nnum_processes: 2  # both\n"


def config(path: Path, section: str = "{compressor: loco2, weights: delta4}") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["config", "--config-file", str(path), "--lowbit_config", section])
    return result.exit_code, result.output


def test_a_section_is_checked_and_added(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE)
    code, output = config(path, "{compressor: lco}")
    assert code == 2
    assert "unknown compressor 'lco'; did you mean 'loco'" in output
    assert path.read_text() == BASE
    assert config(path)[0] == 0
    assert path.read_text() == f"{BASE}lowbit_config:\n  compressor: loco2\n  weights: delta4\n"
    code, output = config(path)
    assert code == 2
    assert "has a lowbit_config section: change it there" in output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    code, output = config(tmp_path / "job.yaml")
    assert code == 2
    assert "there is no configuration file" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_accelerate_writes_by_default(tmp_path: Path, suffix: str) -> None:
    """JSON, in a file of either name."""
    path = tmp_path / f"job.{suffix}"
    write_basic_config(save_location=str(path))
    before = yaml.safe_load(path.read_text())
    assert config(path, "{compressor: loco}")[0] == 0
    assert yaml.safe_load(path.read_text()) == before | {"lowbit_config": {"compressor": "loco"}}
    if suffix == "json":
        json.loads(path.read_text())
