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
from lowbit_strategy.cli import COMMANDS, app
from lowbit_strategy.doctor import doctor
from lowbit_strategy.version import __version__
from testing.private_names import PRIVATE_NAMES
from testing.processes.ranks import run_ranks
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
    for command in COMMANDS:
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


def test_the_doctor_knows_the_releases_that_the_private_names_were_seen_in() -> None:
    assert {name: listed[0].seen.split()[-1] for name, listed in PRIVATE_NAMES.items()} == doctor.TESTED


def test_the_doctor_imports_no_framework() -> None:
    """It takes the time of two imports of torch, its own and that of the autoloading it tries."""
    code = (
        "import sys; from lowbit_strategy.doctor.doctor import examine; list(examine());"
        "print({'lightning', 'accelerate', 'transformers', 'torchmetrics', 'torch._dynamo'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("job", "code", "text"),
    [
        ("num_processes: 8\nlowbit_config: {compressor: loco2}", 0, "loco(bits=2, codebook='unit_gain'"),
        ("lowbit_config: {compressor: loco}", 0, "one process sends no gradients"),
        ("num_processes: 8", 2, "has no lowbit_config section"),
        ("lowbit_config: {compressor: lco}", 2, "did you mean 'loco'"),
        ("distributed_type: DEEPSPEED\nlowbit_config: {compressor: loco}", 2, "DEEPSPEED cannot be compressed"),
        ("distributed_type: FSDP\nlowbit_config: {compressor: loco}", 2, "set fsdp_version: 2"),
        (
            "parallelism_config: {parallelism_config_sp_size: 2}\nlowbit_config: {compressor: loco}",
            2,
            "sp_size = 2 cannot be compressed",
        ),
    ],
)
def test_the_doctor_checks_a_configuration_file(job: str, code: int, text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job)
    found, output = run("doctor", "--config", str(path))
    assert found == code
    assert text in output


def test_the_doctor_needs_the_file_of_a_script() -> None:
    code, output = run("doctor", "train.py", "--lr", "1")
    assert code == 2
    assert "a script needs --config" in output


def _dry_run(rank: int, world_size: int, arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    return ended.value.code


def test_the_doctor_runs_a_script_until_it_prepares_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, script = tmp_path / "job.yaml", tmp_path / "train.py"
    job.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nlowbit_config: {compressor: loco, bits: 4}")
    script.write_text(
        "import sys, torch\nfrom accelerate import Accelerator\nprint(sys.argv[1:])\n"
        "Accelerator(cpu=True).prepare(torch.nn.Linear(64, 64))\nprint('trained')\n"
    )
    arguments = ["doctor", "--config", str(job), "--num-processes", "8", str(script), "--lr", "1"]
    assert run_ranks(_dry_run, 1, arguments, process_group=None) == [0]
    printed = capsys.readouterr().out
    assert "['--lr', '1']" in printed
    assert "compressed gradient all-reduce over 8 ranks" in printed
    assert "trained\n" not in printed.replace("nothing is trained", "")


def test_the_doctor_notes_versions_that_are_newer_than_what_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "99.1.0" if name == "torch" else None)
    notes = [each for each in doctor._newer() if each.level == "note"]
    assert [each.what for each in notes] == ["torch"]
    assert notes[0].found.startswith("99.1.0, tested up to 2.")
