"""``lowbit config``: a section becomes a file that ``lowbit launch`` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from typer.testing import CliRunner

from lowbit_strategy.cli import app
from lowbit_strategy.launch import wizard

BASE = "# ours\ndistributed_type: MULTI_GPU\nnum_processes: 2  # both\n"


def test_a_section_that_is_there_is_replaced() -> None:
    text = "a: 1\nlowbit_config:\n  compressor: loco\n  exempt:\n  - '@vector'\n\n# more\nb: 2\n"
    changed = wizard.with_section(text, {"compressor": "dense"})
    assert yaml.safe_load(changed) == {"a": 1, "b": 2, "lowbit_config": {"compressor": "dense"}}


def test_what_follows_the_section_keeps_its_comments() -> None:
    before, after = "a: 1   # one\nlist:\n    -   x\n\n", "\n# more\nb: 'NO'\n"
    text = f"{before}lowbit_config:\n  compressor: loco\n  # own\n  exempt:\n  - '@vector'\n{after}"
    assert wizard.with_section(text, {"compressor": "dense"}) == f"{before}lowbit_config:\n  compressor: dense\n{after}"


def test_a_file_on_one_line() -> None:
    changed = wizard.with_section('{"a": 1, "lowbit_config": {"compressor": "loco"}}', {"compressor": "dense"})
    assert yaml.safe_load(changed) == {"a": 1, "lowbit_config": {"compressor": "dense"}}


@pytest.mark.parametrize(
    ("base", "note"),
    [
        ("distributed_type: 'NO'\nnum_processes: 1\n", "one process sends no gradients"),
        ("distributed_type: DEEPSPEED\nnum_processes: 8\n", "DEEPSPEED cannot be compressed"),
        ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 1}\n", "set fsdp_version: 2"),
        (BASE, ""),
    ],
)
def test_notes_about_what_would_not_be_compressed(tmp_path: Path, base: str, note: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(base)
    result = CliRunner().invoke(app, ["config", "--config_file", str(path)])
    assert result.exit_code == 0, result.output
    assert note in result.output
    assert ("Note:" in result.output) == bool(note)


def test_only_yaml_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "--config-file", str(tmp_path / "job.json")])
    assert result.exit_code == 2
    assert "job.yaml" in result.output


def test_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    result = CliRunner().invoke(app, ["config", "--config-file", str(path)])
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(path.read_text())
    assert written.pop("lowbit_config") == {"compressor": "loco", "bits": 4}
    ClusterConfig(**written)  # Accelerate takes the rest


def test_a_section_that_is_given_is_checked_and_written(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE)
    given = "{compressor: loco2, weights: delta4}"
    result = CliRunner().invoke(app, ["config", "--config-file", str(path), "--lowbit_config", given])
    assert result.exit_code == 0, result.output
    assert path.read_text() == f"{BASE}lowbit_config:\n  compressor: loco2\n  weights: delta4\n"
    result = CliRunner().invoke(app, ["config", "--config-file", str(path), "--lowbit_config", "{compressor: lco}"])
    assert result.exit_code == 2
    assert "unknown compressor 'lco'; did you mean 'loco'" in result.output
    assert "loco2" in path.read_text()
