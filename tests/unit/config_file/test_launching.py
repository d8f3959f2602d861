"""``accelerate launch`` of a file with a section: what processes would be started with. Nothing is started here."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args

from lowbit_strategy.config_file.section import read_section

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


def launch(argv: list[str]) -> None:
    """``accelerate launch``."""
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(argv))


def _write(path: Path, config: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_section_goes_into_the_environment_and_the_rest_to_accelerate(
    suffix: str, handed: Handed, tmp_path: Path
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


def test_the_default_file(handed: Handed, tmp_path: Path) -> None:
    _write(tmp_path / "default.yaml", {**DDP, "lowbit_config": SECTION})
    launch(["-m", "package.train"])
    assert read_section(handed.prepared["LOWBIT_CONFIG"]) == SECTION
    assert handed.args.module


def test_a_section_in_the_environment(handed: Handed, tmp_path: Path) -> None:
    os.environ["LOWBIT_CONFIG"] = json.dumps(SECTION)
    launch(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])
    assert read_section(handed.prepared["LOWBIT_CONFIG"]) == SECTION
    os.environ["LOWBIT_CONFIG"] = "{compressor: loca}"
    with pytest.raises(ValueError, match="did you mean 'loco'"):
        launch(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])


def test_a_file_without_a_section_is_accelerate_s_own_business(handed: Handed, tmp_path: Path) -> None:
    launch(["--config_file", _write(tmp_path / "job.yaml", DDP), "train.py"])
    assert "LOWBIT_CONFIG" not in handed.prepared
    with pytest.raises(ValueError, match="unknown keys"):
        launch(["--config_file", _write(tmp_path / "job.yaml", {**DDP, "unheard": 1}), "train.py"])


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
                "parallelism_config": {"parallelism_config_sp_size": 2},
                "lowbit_config": SECTION,
            },
            [],
            "sp_size = 2 cannot be compressed",
        ),
        (
            {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO", "lowbit_config": SECTION},
            [],
            "AMAZON_SAGEMAKER is not supported",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    handed: Handed, tmp_path: Path, config: dict[str, Any], arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(["--config_file", _write(tmp_path / "job.yaml", {"num_processes": 2, **config}), *arguments, "train.py"])
    assert not hasattr(handed, "prepared")
