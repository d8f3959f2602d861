"""``lowbit config``: answers become a file that ``lowbit launch`` takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import ComputeEnvironment, DistributedType
from typer.testing import CliRunner

from lowbit_strategy.cli import app, main
from lowbit_strategy.launch import wizard

BASE = "# ours\ndistributed_type: MULTI_GPU\nnum_processes: 2  # both\n"


def test_an_existing_file_keeps_its_part_and_gets_the_section(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE)
    section = {"compressor": "loco", "bits": 3, "exempt": ["@vector", "*.gate.*"], "seed": 7}
    answers = f"loca\n{{compressor: loco, bits: 44}}\n{json.dumps(section)}\n"
    result = CliRunner().invoke(app, ["config", "--config-file", str(path)], input=answers)
    assert result.exit_code == 0, result.output
    assert "did you mean 'loco'" in result.output
    assert "bits must be an integer from 2 to 8" in result.output
    assert path.read_text().startswith(BASE)
    assert yaml.safe_load(path.read_text())["lowbit_config"] == section


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


def test_answers_that_cannot_be_read_are_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE)
    answers = (
        "{compressor: loco, exempt: [@vector]}\n{bits: 3\n{compressor: loco, exempt: 3}\n{compressor: loco, bits: 3}\n"
    )
    result = CliRunner().invoke(app, ["config", "--config-file", str(path)], input=answers)
    assert result.exit_code == 0, result.output
    assert "'@' that cannot start any token" in result.output
    assert "exempt must be a list, got 3" in result.output
    section = {"compressor": "loco", "bits": 3}
    assert yaml.safe_load(path.read_text())["lowbit_config"] == section


def run_without_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command with nothing on standard input: its status."""
    monkeypatch.setattr("sys.argv", ["lowbit", "config", *map(str, arguments)])
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("text", [None, BASE])
def test_without_a_terminal(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    assert run_without_terminal(monkeypatch, "--config-file", path) == 2
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert ("nothing is written" if text else "need a terminal") in errors
    assert (path.read_text() if path.exists() else None) == text


def test_a_new_file_begins_with_accelerate_s_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.MULTI_GPU,
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=4,
    )
    monkeypatch.setattr(wizard, "get_user_input", lambda: config)
    path = tmp_path / "job.yaml"
    result = CliRunner().invoke(app, ["config", "--config-file", str(path)], input="loco\n")
    assert result.exit_code == 0, result.output
    written = yaml.safe_load(path.read_text())
    assert written.pop("lowbit_config") == {"compressor": "loco"}
    path.write_text(yaml.safe_dump(written))
    assert ClusterConfig.from_yaml_file(str(path)).num_processes == 4


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
    result = CliRunner().invoke(app, ["config", "--config_file", str(path)], input="\n")
    assert result.exit_code == 0, result.output
    assert note in result.output
    assert ("Note:" in result.output) == bool(note)


def test_only_yaml_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "--config-file", str(tmp_path / "job.json")])
    assert result.exit_code == 2
    assert "job.yaml" in result.output


def test_without_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.yaml"
    assert run_without_terminal(monkeypatch, "--defaults", "--config-file", path) == 0
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
