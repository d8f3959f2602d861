"""``lowbit launch`` and ``accelerate launch``: what processes would be started with. Nothing is started here."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args

from lowbit_strategy.launch import launcher
from lowbit_strategy.launch.section import read_section

Launch = Callable[[list[str]], None]
DDP = {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": 0}
SECTION = {"compressor": "loco", "bits": 3}


class Handed:
    """What Accelerate was about to start processes with, and the environment that they would have had."""

    args: argparse.Namespace
    prepared: dict[str, str]

    def __call__(self, args: argparse.Namespace) -> None:
        self.args = args
        if args.use_deepspeed:
            _, self.prepared = accelerate_launch.prepare_deepspeed_cmd_env(args)
        elif args.multi_gpu or args.use_fsdp:
            self.prepared = accelerate_launch.prepare_multi_gpu_env(args)
        else:
            _, self.prepared = accelerate_launch.prepare_simple_launcher_cmd_env(args)


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (accelerate_launch, config_args):
        monkeypatch.setattr(module, "default_config_file", str(tmp_path / "default.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Handed:
    recorder = Handed()
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(accelerate_launch, name, recorder)
    return recorder


def stock(argv: list[str]) -> None:
    """``accelerate launch``."""
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(argv))


LAUNCHERS = pytest.mark.parametrize("launch", [launcher.launch, stock], ids=["lowbit", "accelerate"])


def _write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


@LAUNCHERS
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_section_goes_into_the_environment_and_the_rest_to_accelerate(
    launch: Launch, suffix: str, handed: Handed, tmp_path: Path
) -> None:
    text = json.dumps({**DDP, "lowbit_config": SECTION})  # JSON is YAML
    file = tmp_path / f"job.{suffix}"
    file.write_text(text)
    launch(["--config_file", str(file), "train.py", "--config_file", "its own", "--lr", "1"])
    assert read_section(handed.prepared["LOWBIT_CONFIG"]) == SECTION
    assert handed.prepared["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not handed.args.module
    assert handed.args.training_script == "train.py"
    assert handed.args.training_script_args == ["--config_file", "its own", "--lr", "1"]
    assert not hasattr(handed.args, "bits")  # Accelerate makes flags of what is in other mappings
    assert file.read_text() == text


@LAUNCHERS
def test_the_default_file(launch: Launch, handed: Handed, tmp_path: Path) -> None:
    _write(tmp_path / "default.yaml", {**DDP, "lowbit_config": SECTION})
    launch(["-m", "package.train"])
    assert read_section(handed.prepared["LOWBIT_CONFIG"]) == SECTION
    assert handed.args.module


@LAUNCHERS
def test_a_section_in_the_environment(launch: Launch, handed: Handed, tmp_path: Path) -> None:
    os.environ["LOWBIT_CONFIG"] = json.dumps(SECTION)
    launch(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])
    assert read_section(handed.prepared["LOWBIT_CONFIG"]) == SECTION
    os.environ["LOWBIT_CONFIG"] = "{compressor: loca}"
    with pytest.raises(ValueError, match="did you mean 'loco'"):
        launch(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])


def test_a_file_without_a_section_is_accelerate_s_own_business(handed: Handed, tmp_path: Path) -> None:
    stock(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])
    assert "LOWBIT_CONFIG" not in handed.prepared
    with pytest.raises(ValueError, match="unknown keys"):
        stock(["--config_file", _write(tmp_path / "job.yaml", {**DDP, "unheard": 1}), "train.py"])


def test_flags_of_accelerate_in_both_spellings_and_a_module(handed: Handed) -> None:
    arguments = ["--num-processes=4", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    arguments += ["--main_process_port", "5555", "--rdzv_backend", "c10d", "--multi_gpu", "--mixed_precision", "bf16"]
    launcher.launch([*arguments, "--lowbit-config", "{compressor: loco}", "-m", "package.train", "-x"])
    args = handed.args
    assert (args.num_processes, args.num_machines, args.machine_rank) == (4, 2, 1)
    assert (args.main_process_ip, args.main_process_port, args.rdzv_backend) == ("10.0.0.1", 5555, "c10d")
    assert (args.module, args.training_script, args.training_script_args) == (True, "package.train", ["-x"])
    assert handed.prepared["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert args.nnodes == "2"
    assert args.node_rank == 1


def test_the_flag_goes_before_the_file(handed: Handed, tmp_path: Path) -> None:
    file = _write(tmp_path / "job.yaml", {**DDP, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "--lowbit_config", "{compressor: loco2}", "train.py"])
    assert read_section(handed.prepared["LOWBIT_CONFIG"]) == {"compressor": "loco2"}


@pytest.mark.parametrize("switch", ["LOWBIT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_processes_that_would_not_find_the_package_are_not_started(handed: Handed, switch: str) -> None:
    flags = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--lowbit_config", "{compressor: loco}"]
    os.environ[switch] = "0"
    with pytest.raises(
        ValueError, match=rf"\({switch}=0 turns it off\).* launch it as -m lowbit_strategy.run train.py"
    ):
        launcher.launch([*flags, "train.py"])
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
    assert handed.prepared["ACCELERATE_USE_CPU"] == "true"


def test_the_cpu_flag(handed: Handed) -> None:
    flags = ["--cpu", "--num_processes", "2", "--main_process_port", "0"]
    launcher.launch([*flags, "--lowbit_config", "{compressor: loco}", "train.py"])
    assert handed.args.multi_gpu
    assert handed.prepared["ACCELERATE_USE_CPU"] == "true"


def test_fsdp_on_cpu(handed: Handed, tmp_path: Path) -> None:
    fsdp = {"distributed_type": "FSDP", "num_processes": 2, "main_process_port": 0, "use_cpu": True}
    file = _write(tmp_path / "job.yaml", {**fsdp, "fsdp_config": {"fsdp_version": 2}, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "train.py"])
    assert handed.prepared["ACCELERATE_USE_FSDP"] == "true"
    assert handed.prepared["FSDP_VERSION"] == "2"
    assert handed.prepared["ACCELERATE_USE_CPU"] == "true"


def test_one_process_on_cpu_is_accelerate_s_own_business(handed: Handed) -> None:
    launcher.launch(["--cpu", "--num_processes", "1", "--lowbit_config", "{compressor: loco}", "train.py"])
    assert handed.args.cpu
    assert not handed.args.multi_gpu


def test_debug_mode_does_not_hide_failures(handed: Handed, tmp_path: Path) -> None:
    file = _write(tmp_path / "job.yaml", {**DDP, "debug": True, "lowbit_config": SECTION})
    launcher.launch(["--config_file", file, "train.py"])
    assert handed.prepared["ACCELERATE_DEBUG_MODE"] == "true"
    assert not handed.args.debug


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({**DDP, "lowbit_config": {"compressor": "loca"}}, [], "did you mean 'loco'"),
        ({**DDP, "lowbit_config": "loco"}, [], "must be a mapping"),
        ({"distributed_type": "DEEPSPEED", "lowbit_config": SECTION}, [], "DEEPSPEED cannot be compressed: use MULTI"),
        ({"distributed_type": "MEGATRON_LM", "lowbit_config": SECTION}, [], "MEGATRON_LM cannot be compressed"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}, "lowbit_config": SECTION}, [], "FSDP1"),
        ({"distributed_type": "FSDP", "lowbit_config": SECTION}, [], "set fsdp_version: 2"),
        ({**DDP, "lowbit_config": SECTION}, ["--use_deepspeed"], "DEEPSPEED cannot be compressed"),
        ({**DDP, "lowbit_config": SECTION}, ["--use_fsdp"], "FSDP1 cannot be compressed"),
        ({**DDP, "low_bit_config": SECTION}, [], "unknown key 'low_bit_config'; did you mean 'lowbit_config'?"),
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
    ],
)
@LAUNCHERS
def test_what_cannot_be_served_is_refused_before_anything_starts(
    launch: Launch, handed: Handed, tmp_path: Path, config: dict[str, Any], arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(["--config_file", _write(tmp_path / "job.yaml", {"num_processes": 2, **config}), *arguments, "train.py"])
    assert not hasattr(handed, "prepared")


def test_lowbit_launch_insists_on_a_section(handed: Handed, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no lowbit_config section: add lowbit_config"):
        launcher.launch(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])
    with pytest.raises(ValueError, match="there is no lowbit_config section: give a configuration file"):
        launcher.launch(["train.py"])
    assert not hasattr(handed, "prepared")


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
    module, planned, script = commands[0][1:4], json.loads(commands[0][4]), commands[0][5:]
    assert module == ["-m", "lowbit_strategy.run", "--lowbit_dry_run"]
    assert planned == {"scatter": True, "world_size": 8, "num_nodes": 1}
    assert script == ["train.py", "--lr", "1"]
