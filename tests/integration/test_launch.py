"""A section and an unmodified script under stock launchers, and the run module.

Most start interpreters; what can be tested without doing so is in tests/unit/config_file.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import yaml

from testing.processes.ranks import run_ranks
from testing.processes.scripts import REPOSITORY, as_main, run_script
from testing.record import read_record

LOWBIT = ["-c", "from lowbit_strategy.cli import main; main()"]
STOCK = ["-m", "accelerate.commands.launch"]
STOCK_ON_CPU = {"ACCELERATE_USE_CPU": "true"}  # which Accelerate's own launcher alone takes for one process
SECTION: dict[str, Any] = {"compressor": "loco", "bits": 4}
ON_CPU_WITH_SECTION = {**STOCK_ON_CPU, "LOWBIT_CONFIG": json.dumps(SECTION)}
SCRIPT = REPOSITORY / "tests" / "integration" / "scripts" / "lm.py"
RESTARTABLE = REPOSITORY / "tests" / "integration" / "scripts" / "restartable.py"
TRAINER_SCRIPT = REPOSITORY / "tests" / "integration" / "scripts" / "lm_trainer.py"
CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {"distributed_type": "MULTI_GPU"},
    "fsdp": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    },
}
_COMMON = {"num_processes": 2, "main_process_port": 0, "mixed_precision": "no"}


def config(folder: Path, kind: str, **more: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**CONFIGS[kind], **_COMMON, **more}))
    return path


def facts(folder: Path) -> list[dict[str, Any]]:
    """What every rank wrote."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def uncompressed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The script without a section."""
    folder = tmp_path_factory.mktemp("uncompressed")
    run_ranks(as_main, 2, SCRIPT, ["--out", folder], STOCK_ON_CPU, folder, timeout=280, process_group=None)
    return facts(folder)


@pytest.fixture(scope="module")
def launched_with_a_section(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """The folder of the script's results under ``accelerate launch``, and what it wrote to standard error."""

    @functools.cache
    def launched(kind: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(kind)
        job = config(folder, kind, lowbit_config=SECTION)
        return folder, run_script(
            [*STOCK, "--config_file", job, SCRIPT, "--out", folder], env=STOCK_ON_CPU, timeout=280
        ).stderr

    return launched


@pytest.fixture(scope="module")
def uncompressed_trainer(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The Trainer's script under torchrun."""
    folder = tmp_path_factory.mktemp("uncompressed_trainer")
    run_script([TRAINER_SCRIPT, "--out", folder], world_size=2, timeout=280)
    return facts(folder)


RECORDS = {"DistributedDataParallel": ["DDPHook.reduce"], "FSDPModel": ["CompressedReduceScatter"]}


def check(compressed: list[dict[str, Any]], uncompressed: list[dict[str, Any]], model: str, out: Path) -> None:
    for rank, plain in zip(compressed, uncompressed, strict=True):
        assert rank["loss"] == pytest.approx(plain["loss"], rel=0.005)
        assert rank["loss"] < 0.8 * rank["losses"][0]
        assert rank["model"] == model
        assert rank["records"] == RECORDS[model]
        assert plain["records"] == [""]
        assert rank["sent"] == pytest.approx(rank["steps"] * rank["account"], rel=0.02)  # headers
        assert rank["steps"] == 20
        assert rank["resumed"]
        assert rank["argv"] == ["--out", str(out)]
    assert compressed[0]["bits"] == compressed[1]["bits"]
    assert compressed[0]["bits"] != uncompressed[0]["bits"]


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_config_file_and_an_unmodified_script(
    kind: str, uncompressed: list[dict[str, Any]], launched_with_a_section: Callable[[str], tuple[Path, str]]
) -> None:
    folder, errors = launched_with_a_section(kind)
    assert "compressed gradient" in errors  # the start-up report
    check(facts(folder), uncompressed, {"ddp": "DistributedDataParallel", "fsdp": "FSDPModel"}[kind], folder)


def test_the_section_in_the_environment_of_ranks(tmp_path: Path, uncompressed: list[dict[str, Any]]) -> None:
    run_ranks(as_main, 2, SCRIPT, ["--out", tmp_path], ON_CPU_WITH_SECTION, tmp_path, timeout=280, process_group=None)
    check(facts(tmp_path), uncompressed, "DistributedDataParallel", tmp_path)


@pytest.mark.slow
def test_the_run_module_where_nothing_is_autoloaded(tmp_path: Path, uncompressed: list[dict[str, Any]]) -> None:
    command = ["-m", "lowbit_strategy.run", "--lowbit_config", json.dumps(SECTION), SCRIPT, "--out", tmp_path]
    run_script(command, world_size=2, env={**STOCK_ON_CPU, "LOWBIT_AUTOLOAD": "0"}, timeout=280)
    check(facts(tmp_path), uncompressed, "DistributedDataParallel", tmp_path)


ADAPTIVE: dict[str, Any] = {
    "controller": {  # two epochs of five steps; the second window closes at step 8
        "name": "accordion",
        "light": {"compressor": "loco", "bits": 8, "block_size": 32},
        "heavy": {"compressor": "loco", "bits": 2, "block_size": 32},
        "interval": 4,
        "unit": "steps",
        "eta": 10.0,
    },
    "monitor": {"every_n_steps": 4},
}


@pytest.mark.slow  # without death and a new launch: test_accelerate_adaptive.py
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_decisions_after_a_rank_was_killed_in_the_middle_of_a_phase(kind: str, tmp_path: Path) -> None:
    def run(folder: Path, *kill_at: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        job = config(folder, kind, lowbit_config={**ADAPTIVE, "record": str(folder)})
        return run_script(
            [*STOCK, "--config_file", job, RESTARTABLE, folder, *kill_at], env=STOCK_ON_CPU, timeout=280, check=False
        )

    def losses(folder: Path, rank: int) -> dict[str, str]:
        return dict(line.split() for line in (folder / f"losses-{rank}.txt").read_text().splitlines())

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole)
    assert expected.returncode == 0
    assert run(broken, "8").returncode != 0
    resumed = run(broken)
    assert resumed.returncode == 0
    assert "from 6" in resumed.stdout
    assert expected.stdout.strip() in resumed.stdout  # the weights at the end
    for rank in range(2):
        assert losses(broken, rank) == losses(whole, rank)
        assert len(losses(whole, rank)) == 10
    levels = [losses(whole, 0)[str(step)].partition("/")[2] for step in range(10)]
    assert len(set(levels)) == 2
    assert levels[5] == levels[6]  # the checkpoint cut a phase
    records = [
        [line for line in read_record(folder) if line["kind"] in ("observation", "switch")]
        for folder in (whole, broken)
    ]
    assert [(line["kind"], line["step"]) for line in records[0]] == [
        (line["kind"], line["step"]) for line in records[1]
    ]
    assert [line["step"] for line in records[0] if line["kind"] == "observation"] == [0, 4, 8]


def checked_trainer(kind: str, folder: Path) -> list[dict[str, Any]]:
    ranks = facts(folder)
    for rank in ranks:
        assert rank["losses"][-1] < rank["losses"][0] - 0.3
        assert rank["resumed"]
        assert rank["model"] == {"ddp": "DistributedDataParallel", "fsdp": "FSDPLlamaForCausalLM"}[kind]
        assert rank["steps"] == 8
        assert rank["sent"] == pytest.approx(rank["steps"] * rank["account"], rel=0.01)  # headers
    assert ranks[0]["bits"] == ranks[1]["bits"]
    return ranks


def test_an_unmodified_trainer_script(tmp_path: Path) -> None:
    run_ranks(
        as_main, 2, TRAINER_SCRIPT, ["--out", tmp_path], ON_CPU_WITH_SECTION, tmp_path, timeout=280, process_group=None
    )
    checked_trainer("ddp", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_trainer_script_under_each_launcher(
    kind: str, tmp_path: Path, uncompressed_trainer: list[dict[str, Any]]
) -> None:
    more = {} if kind == "ddp" else {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    fsdp = {"fsdp_config": {**CONFIGS[kind].get("fsdp_config", {}), **more}} if more else {}
    job = config(tmp_path, kind, lowbit_config=SECTION, **fsdp)
    run_script([*STOCK, "--config_file", job, TRAINER_SCRIPT, "--out", tmp_path], env=STOCK_ON_CPU, timeout=280)
    ranks = checked_trainer(kind, tmp_path)
    for rank, plain in zip(ranks, uncompressed_trainer, strict=True):
        assert rank["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.005)
        assert rank["losses"] != plain["losses"]


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.slow) for name in ("test_sync.py", "test_script.py", "test_ops.py")]
)
def test_accelerate_s_own_test_scripts(script: str, tmp_path: Path) -> None:
    path = Path(accelerate.__file__).parent / "test_utils" / "scripts" / script
    job = config(tmp_path, "ddp", lowbit_config=SECTION)
    run_script([*STOCK, "--config_file", job, path], env=STOCK_ON_CPU, timeout=280)


@pytest.mark.slow
def test_the_command_accelerate_test_on_a_file_with_a_section(tmp_path: Path) -> None:
    job = config(tmp_path, "ddp", lowbit_config=SECTION)
    command = [*STOCK[:-1], "accelerate.commands.accelerate_cli", "test", "--config_file", job]
    assert "Test is a success!" in run_script(command, env=STOCK_ON_CPU, timeout=280).stdout


@pytest.mark.slow  # in parts: tests/unit/doctor
def test_a_dry_run_reports_and_trains_nothing(tmp_path: Path) -> None:
    job = config(tmp_path, "fsdp", lowbit_config=SECTION)
    command = [*LOWBIT, "doctor", "--config", job, "--num-processes", "8", SCRIPT, "--out", tmp_path]
    done = run_script(command, timeout=200)
    assert "dry run, nothing is trained: Model" in done.stdout
    assert "compressed gradient reduce-scatter over 8 ranks" in done.stdout
    assert "memory per rank" in done.stdout
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lowbit_config": {"compressor": "loco", "bit": 4}}, "did you mean 'bits'?"),
        ({"distributed_type": "FSDP", "lowbit_config": SECTION}, "set fsdp_version: 2"),
    ],
)
@pytest.mark.slow
def test_bad_input_starts_nothing(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    job = config(tmp_path, "ddp", **more)
    done = run_script([*STOCK, "--config_file", job, "train.py"], cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "started").exists()


_STEP = """\
import os, torch
from accelerate import Accelerator, notebook_launcher
def step(accelerator):
    net = torch.nn.Linear(16, 64)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    sync = accelerator.lowbit.sync
    line = f"bits {accelerator.lowbit.plugin.compressor.bits} {sync.ranks.peers.sent_nbytes > 0}\\n"
    print(line, end="", flush=True)  # in one write: two ranks share the pipe
    accelerator.free_memory(model, optimizer)
"""
_OWN_PLUGINS = """\
from lowbit_strategy.accelerate import LowBitAccelerator, LowBitPlugin
step(Accelerator())
accelerator = Accelerator()
LowBitPlugin("loco2").attach(accelerator)
step(accelerator)
step(LowBitAccelerator(lowbit_plugin=LowBitPlugin("loco3")))
late = Accelerator()
model = late.prepare(torch.nn.Linear(16, 64))
for accelerator in (accelerator, late):
    try:
        LowBitPlugin("loco2").attach(accelerator)
    except ValueError as error:
        print("refused", error)
from lowbit_strategy.transformers import attach
from lowbit_strategy.transformers import ResidualCallback
from transformers import Trainer, TrainingArguments
trainer = Trainer(torch.nn.Linear(2, 2), TrainingArguments("out", use_cpu=True, report_to="none"))
before = trainer.accelerator.lowbit
print("trainer", attach(trainer, "loco2").plugin.compressor.bits, before.plugin.compressor.bits, flush=True)
print("callbacks", sum(isinstance(each, ResidualCallback) for each in trainer.callback_handler.callbacks), flush=True)
"""


def printed_with_the_section(script: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What two ranks print that run `script` with the section in their environment."""
    (folder / "train.py").write_text(script)
    run_ranks(as_main, 2, "train.py", [], ON_CPU_WITH_SECTION, folder, timeout=280, process_group=None)
    return capsys.readouterr().out


def test_a_script_s_own_plugin_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_with_the_section(_STEP + _OWN_PLUGINS, tmp_path, capsys)
    for bits, times in ((4, 1), (2, 1), (3, 1)):
        assert printed.count(f"bits {bits} True") == 2 * times
    assert printed.count("the script's own LowBitPlugin is used, not the lowbit_config section") == 3
    assert printed.count("refused this Accelerator already has a LowBitPlugin: attach only one") == 2
    assert printed.count("refused this Accelerator has already prepared a model or an optimizer") == 2
    assert printed.count("trainer 2 4") == 2
    assert printed.count("callbacks 1") == 2


@pytest.mark.slow
def test_a_notebook_that_sets_the_section_late(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text(
        f"{_STEP}"
        f"os.environ['LOWBIT_CONFIG'] = {json.dumps(SECTION)!r}\n"
        "notebook_launcher(lambda: step(Accelerator()), num_processes=2)\n"
    )
    done = run_script("cells.py", env=STOCK_ON_CPU, cwd=tmp_path)
    assert done.stdout.count("bits 4 True") == 2


def test_training_before_anything_is_prepared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        f"{_STEP}"
        "accelerator = Accelerator()\n"
        "net = torch.nn.Linear(2, 2)\n"
        "torch.optim.SGD(net.parameters(), lr=0.1).step()\n"
        "step(accelerator)\n"
    )
    printed = printed_with_the_section(script, tmp_path, capsys)
    assert printed.count("before any model has gone through accelerator.prepare") == 2
    assert printed.count("bits 4 True") == 2
