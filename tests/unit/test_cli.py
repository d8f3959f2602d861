"""The command as a newcomer meets it: help, versions, what the machine has."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lowbit_strategy import PRESETS
from lowbit_strategy.cli import app
from lowbit_strategy.launch import doctor
from lowbit_strategy.launch.arguments import launch_parser
from lowbit_strategy.version import __version__


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_version() -> None:
    assert run("--version") == (0, f"lowbit-strategy {__version__}\n")


def test_help_names_every_command() -> None:
    status, text = run("--help")
    assert status == 0
    for command in ("doctor", "launch", "config", "report"):
        assert command in text


def test_the_doctor_names_what_it_found_and_every_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(doctor, "Console", lambda: Console(file=out, width=1000))
    doctor.doctor(strict=True)
    assert __version__ in out.getvalue()
    assert ", ".join(sorted(PRESETS)) in out.getvalue()
    assert "0 problems" in out.getvalue()


def test_the_doctor_on_packages_that_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(doctor, "Console", lambda: Console(file=out, width=1000))
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": doctor._OPTIONAL["matplotlib"]})
    doctor.doctor(strict=True)
    assert "pip install 'lowbit-strategy[report]'" in out.getvalue()


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"torch": "2.10.1+cu128"}, "needs 2.11 or newer"),
        ({"accelerate": "1.9rc1"}, "needs 1.15 or newer"),
        ({"lightning": None}, "pip install lightning"),
    ],
)
def test_the_doctor_on_packages_that_will_not_do(
    versions: dict[str, str | None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else before(name))
    problems = [finding.advice for finding in doctor.examine() if finding.level == "problem"]
    assert problems == [problem]
    assert run("doctor", "--strict")[0] == 1


def test_the_doctor_on_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", "natvie")
    (problem,) = [finding for finding in doctor.examine() if finding.level == "problem"]
    assert "'natvie' is not one of torch, native, triton" in problem.found
    assert "LOWBIT_KERNELS" in problem.advice


def test_launch_help_has_what_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lowbit", "launch", "--help"])
    text = launch_parser().format_help()
    assert text.startswith("usage: lowbit launch [flags] train.py [its own arguments]")
    for flag in (
        "--config_file",
        "--num_processes",
        "--machine_rank",
        "--fsdp_version",
        "--lowbit_config",
        "--dry_run",
    ):
        assert f"{flag} " in text
    assert "--num-processes" not in text  # the other spelling works too
    assert "megatron" not in text.replace("--use_megatron_lm", "").replace("Megatron-LM", "")
    assert launch_parser().parse_args(["--zero_stage", "2", "--num-processes", "2", "train.py"]).zero_stage == 2
