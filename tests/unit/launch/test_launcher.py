"""``lowbit launch``: what it hands to Accelerate's launcher. Nothing is started here."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from lowbit_strategy.launch import launcher

DDP = {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": 0}
SECTION = {"compressor": "loco", "bits": 3}


class Handed:
    """What `launch_command` was called with, and the environment it was called in."""

    args: argparse.Namespace
    config: dict[str, Any] | None = None
    env: dict[str, str]

    def __call__(self, args: argparse.Namespace) -> None:
        self.args = args
        if args.config_file:
            self.config = yaml.safe_load(Path(args.config_file).read_text())
        self.env = dict(os.environ)
        checked, _, _ = _validate_launch_command(args)  # Accelerate's own checks pass
        runs_several = checked.multi_gpu or checked.use_fsdp
        prepare = prepare_multi_gpu_env if runs_several else prepare_simple_launcher_cmd_env
        self.prepared = prepare(checked)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.setattr(launcher, "default_config_file", str(tmp_path / "none.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    recorder = Handed()
    monkeypatch.setattr(launcher, "launch_command", recorder)
    return recorder


def _write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_the_section_goes_into_the_environment_and_the_rest_to_accelerate(handed: Handed, tmp_path: Path) -> None:
    file = _write(tmp_path / "job.yaml", {**DDP, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "train.py", "--config_file", "its own", "--lr", "1"])
    assert handed.config == DDP
    assert json.loads(handed.env["LOWBIT_CONFIG"]) == SECTION
    assert handed.args.module
    assert handed.args.training_script == "lowbit_strategy.run"
    assert handed.args.training_script_args == ["train.py", "--config_file", "its own", "--lr", "1"]
    assert yaml.safe_load(Path(file).read_text())["lowbit_config"] == SECTION  # the user's file is as it was
    assert not os.path.exists(handed.args.config_file)


def test_flags_of_accelerate_in_both_spellings_and_a_module(handed: Handed) -> None:
    arguments = ["--num-processes=4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    arguments += ["--main_process_port", "5555", "--rdzv_backend", "c10d", "--multi_gpu", "--mixed_precision", "bf16"]
    launcher.launch([*arguments, "--lowbit-config", "{compressor: loco}", "-m", "package.train", "-x"])
    args = handed.args
    assert (args.num_processes, args.num_machines, args.machine_rank) == (4, 2, 1)
    assert (args.main_process_ip, args.main_process_port, args.rdzv_backend) == ("10.0.0.1", 5555, "c10d")
    assert args.training_script_args == ["-m", "package.train", "-x"]
    assert handed.prepared["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert args.nnodes == "2"
    assert args.node_rank == 1


def test_the_run_module_is_not_wrapped_in_itself(handed: Handed) -> None:
    flags = ["--multi_gpu", "--num_processes", "2", "--lowbit_config", "{compressor: loco}"]
    launcher.launch([*flags, "-m", "lowbit_strategy.run", "train.py"])
    assert handed.args.training_script_args == ["train.py"]


@pytest.mark.parametrize("config", [{"distributed_type": "MULTI_CPU"}, {"distributed_type": "MULTI_GPU"}])
def test_several_processes_on_cpu_are_several_processes(
    handed: Handed, tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    port = {"main_process_port": 0, "num_processes": 2}
    file = _write(tmp_path / "job.yaml", {**config, **port, "use_cpu": True, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "train.py"])
    assert handed.args.multi_gpu
    assert handed.args.nproc_per_node == "2"
    assert handed.env["ACCELERATE_USE_CPU"] == "true"


def test_the_cpu_flag(handed: Handed) -> None:
    flags = ["--cpu", "--num_processes", "2", "--main_process_port", "0"]
    launcher.launch([*flags, "--lowbit_config", "{compressor: loco}", "train.py"])
    assert handed.args.multi_gpu
    assert handed.env["ACCELERATE_USE_CPU"] == "true"


def test_fsdp_on_cpu(handed: Handed, tmp_path: Path) -> None:
    fsdp = {"distributed_type": "FSDP", "num_processes": 2, "main_process_port": 0, "use_cpu": True}
    file = _write(tmp_path / "job.yaml", {**fsdp, "fsdp_config": {"fsdp_version": 2}, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "train.py"])
    assert handed.prepared["ACCELERATE_USE_FSDP"] == "true"
    assert handed.prepared["FSDP_VERSION"] == "2"
    assert handed.env["ACCELERATE_USE_CPU"] == "true"


def test_one_process_on_cpu_is_accelerate_s_own_business(handed: Handed) -> None:
    launcher.launch(["--cpu", "--num_processes", "1", "--lowbit_config", "{compressor: loco}", "train.py"])
    assert handed.args.cpu
    assert not handed.args.multi_gpu


def test_debug_mode_does_not_hide_failures(handed: Handed, tmp_path: Path) -> None:
    file = _write(tmp_path / "job.yaml", {**DDP, "debug": True, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "train.py"])
    assert handed.env["ACCELERATE_DEBUG_MODE"] == "true"
    assert not handed.args.debug


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (DDP, [], "has no lowbit_config section: add lowbit_config"),
        ({**DDP, "lowbit_config": {"compressor": "loca"}}, [], "did you mean 'loco'"),
        ({**DDP, "lowbit_config": "loco"}, [], "must be a mapping"),
        ({"distributed_type": "DEEPSPEED", "lowbit_config": SECTION}, [], "DEEPSPEED cannot be compressed: use MULTI"),
        ({"distributed_type": "MEGATRON_LM", "lowbit_config": SECTION}, [], "MEGATRON_LM cannot be compressed"),
        ({"distributed_type": "XLA", "lowbit_config": SECTION}, [], "XLA cannot be compressed"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}, "lowbit_config": SECTION}, [], "FSDP1"),
        ({"distributed_type": "FSDP", "lowbit_config": SECTION}, [], "set fsdp_version: 2"),
        ({**DDP, "lowbit_config": SECTION}, ["--use_deepspeed"], "DEEPSPEED cannot be compressed"),
        ({**DDP, "lowbit_config": SECTION}, ["--use_fsdp"], "FSDP1 cannot be compressed"),
        ({**DDP, "lowbit_config": SECTION}, ["--no_python"], "leave --no_python out"),
        ({**DDP, "lowbit_config": SECTION}, ["missing.py"], "there is no script 'missing.py'"),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2},
                "parallelism_config": {"parallelism_config_cp_size": 2},
                "lowbit_config": SECTION,
            },
            [],
            "cp_size = 2 cannot be compressed",
        ),
        (
            {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO", "lowbit_config": SECTION},
            [],
            "AMAZON_SAGEMAKER cannot be served",
        ),
        (None, [], "there is no lowbit_config section: give a configuration file"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    handed: Handed, tmp_path: Path, config: dict[str, Any] | None, arguments: list[str], message: str
) -> None:
    file = [] if config is None else ["--config_file", _write(tmp_path / "job.yaml", config)]
    with pytest.raises(ValueError, match=message):
        launcher.launch([*file, *arguments, "train.py"])
    assert not hasattr(handed, "args")


def test_a_configuration_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="there is no configuration file"):
        launcher.launch(["--config_file", "missing.yaml", "train.py"])


def test_a_dry_run_takes_this_process_s_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Replaced(Exception):
        pass

    commands: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        commands.append(command)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    fsdp = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
    file = _write(tmp_path / "job.yaml", {**fsdp, "lowbit_config": SECTION})
    with pytest.raises(Replaced):
        launcher.launch(["--dry-run", "--config_file", file, "train.py", "--lr", "1"])
    assert commands[0][1:] == ["-m", "lowbit_strategy.run", "--lowbit_dry_run", "fsdp:8", "train.py", "--lr", "1"]


def test_bench_needs_no_section(handed: Handed) -> None:
    launcher.launch(["--num_processes", "2", "bench", "--out", "links.json"])
    assert (handed.args.module, handed.args.training_script) == (True, "lowbit_strategy.launch.bench")
    assert handed.args.training_script_args == ["--out", "links.json"]


def test_a_script_called_bench_is_a_script(handed: Handed) -> None:
    Path("bench").write_text("")
    with pytest.raises(ValueError, match="there is no lowbit_config section"):
        launcher.launch(["--num_processes", "2", "bench"])
