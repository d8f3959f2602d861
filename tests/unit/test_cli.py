"""The command as a newcomer meets it: help, versions, what the machine has."""

from __future__ import annotations

import functools
import importlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from lowbit_strategy import PRESETS
from lowbit_strategy.cli import app
from lowbit_strategy.launch import doctor
from lowbit_strategy.launch.launcher import launch_parser
from lowbit_strategy.version import __version__
from testing.processes.scripts import REPOSITORY

_autoloading = functools.cache(doctor._autoloading)  # in a new interpreter, once


@pytest.fixture(autouse=True)
def _tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_autoloading", _autoloading)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_version() -> None:
    assert run("--version") == (0, f"lowbit-strategy {__version__}\n")


def test_the_command_begins_without_what_only_some_of_its_commands_need() -> None:
    """A wrong number is told at once, and `lowbit` works where the packages of the report are not installed."""
    code = (
        "import sys, lowbit_strategy.cli; print({'torch', 'matplotlib', 'jinja2', 'accelerate'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


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
        ({"torch": "1.13.1+cu117"}, "needs torch>="),
        ({"accelerate": "0.9rc1"}, "needs accelerate>="),
        ({"lightning": None}, "pip install 'lightning"),
        ({"lightning": "2.6.2"}, "GHSA-w37p-236h-pfx3"),
        ({"pytorch-lightning": "2.6.3+local"}, "GHSA-w37p-236h-pfx3"),
    ],
)
def test_the_doctor_on_packages_that_will_not_do(
    versions: dict[str, str | None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else before(name))
    (advice,) = [finding.advice for finding in doctor.examine() if finding.level == "problem"]
    assert problem in advice
    assert run("doctor", "--strict")[0] == 1


@pytest.mark.parametrize("name", ["lightning_fabric", "Lightning.Fabric"])
def test_the_doctor_finds_a_malicious_release_however_its_name_is_spelled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"{name}-2.6.3.dist-info"  # what pip leaves behind
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.6.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = [finding for finding in doctor.examine() if finding.level == "problem"]
    assert (problem.what, problem.found) == ("lightning-fabric", "2.6.3")
    assert "replace every credential" in problem.advice


def test_malicious_releases_are_never_installed() -> None:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    bounds = {each.name: each.specifier for each in map(Requirement, texts) if "lightning" in each.name}
    assert set(bounds) == {"lightning", "pytorch-lightning"}
    for bound in bounds.values():
        assert [version for version in ("2.6.1", "2.6.2", "2.6.3", "2.6.4") if version in bound] == ["2.6.1", "2.6.4"]


def test_the_doctor_on_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", "natvie")
    (problem,) = [finding for finding in doctor.examine() if finding.level == "problem"]
    assert "'natvie' is not one of torch, native, triton" in problem.found
    assert "LOWBIT_KERNELS" in problem.advice


def test_the_doctor_does_not_advise_a_triton_that_may_not_fit_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "triton" else before(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H200")
    monkeypatch.setattr("lowbit_strategy.kernels.backends.triton_available", lambda: False)
    advice = {finding.what: finding.advice for finding in doctor.examine()}
    for what in ("triton", "GPU kernels"):
        assert "CUDA" in advice[what]
        assert "pip install" not in advice[what]


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


def test_the_doctor_names_what_another_package_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit_strategy.private_names import PRIVATE_NAMES, PrivateName

    gone = PrivateName(target="torch.nn:Module._gone", use="called", seen="torch 2.13", reason="of this test")
    monkeypatch.setitem(PRIVATE_NAMES, "torch", (*PRIVATE_NAMES["torch"], gone))
    problems = [finding for finding in doctor.examine() if finding.level == "problem"]
    assert any("torch.nn:Module._gone is gone" in finding.found for finding in problems)


def test_the_doctor_notes_versions_that_are_newer_than_what_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "99.1.0" if name == "torch" else None)
    notes = [each for each in doctor._private_names() if each.level == "note"]
    assert [each.what for each in notes] == ["torch"]
    assert notes[0].found.startswith("99.1.0, tested up to 2.")
