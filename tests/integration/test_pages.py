"""Every page: files and commands in an empty folder, snippets, commands that others test, start-up reports."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch

from testing.pages import blocks, commands, files
from testing.processes.ranks import run_ranks
from testing.processes.scripts import REPOSITORY, as_main, run_script

ON_CPU = {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}


def runnable(page: str) -> list[str]:
    """Commands that need nothing but the page's files and the recipes. Those for several machines have other tests."""
    names = [*files(page), "lowbit report", "recipes/"]
    found: list[str] = []
    for line in commands(page):
        if "--machine_rank" in line or "$" in line or not any(name in line for name in names):
            continue
        if line.startswith("lowbit report") or "--resume" in line:  # of the run before
            line = f"{found.pop()} && {line}"
        found.append(line)
    return found


def shorter(command: str) -> str:
    """A recipe's fifty steps are one and a few."""
    return re.sub(r"--steps (\d+)", lambda steps: f"--steps {4 + int(steps[1]) // 50}", command)


PAGES = ("accelerate.md", "fabric.md", "hf-trainer.md", "lightning.md", "pytorch.md")
CASES = [(page, command) for page in PAGES for command in runnable(page)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {page: tmp_path_factory.mktemp(page.partition(".")[0]) for page, _ in CASES}
    for page, folder in made.items():
        for name, text in files(page).items():
            (folder / name).write_text(text, encoding="utf-8")
        shutil.copytree(REPOSITORY / "recipes", folder / "recipes")
    return made


def test_the_pages_have_what_is_run() -> None:
    assert {"compressed.py", "train.py", "job.yaml", "fsdp2.yaml", "adaptive.yaml"} <= files("accelerate.md").keys()
    assert {"compressed_trainer.py", "trainer.py", "job.yaml", "adaptive.yaml"} <= files("hf-trainer.md").keys()
    assert {"model.py", "compressed.py", "train.py", "config.yaml"} <= files("lightning.md").keys()
    assert {"loop.py"} <= files("fabric.md").keys()
    assert {"ddp.py", "fsdp2.py"} == files("pytorch.md").keys()
    assert len(CASES) >= 17


# Commands that need what a test machine does not have, or that other tests run; each with the reason.
ELSEWHERE = {
    "pip install .": "tests/unit/test_packaging.py builds and installs",
    "lowbit config --config-file mine.yaml --lowbit_config '{compressor: loco2}'": "tests/unit/config_file",
    "lowbit doctor": "tests/unit/test_cli.py",
    "python train.py": "test_new_compressor.py",
    'python -m pytest -m "" tests/integration/test_invariants.py -k mine': "test_new_compressor.py, on the page's file",
    "torchrun --nproc-per-node 2 recipes/lora.py --steps 60": "test_recipes.py",
    "torchrun --nproc-per-node 2 recipes/dlrm.py": "test_recipes.py",
    "python -m recipes.dion --devices 2 --steps 200": "test_recipes.py",
    'pip install "ray[train]"': "test_recipes.py runs what needs it, where it is installed",
    "python -m recipes.ray_train --workers 2 --steps 60": "test_recipes.py",
    "kubectl apply -f recipes/clusters/kubeflow.yaml": "needs a cluster; test_recipes.py checks the file",
    "sky launch -c lowbit recipes/clusters/skypilot.yaml": "needs a cloud; test_recipes.py checks the file",
    "python recipes/resnet.py --epochs 3": "test_recipes.py",
    "python recipes/wandb_offline.py --steps 60": "test_recipes.py",
    "ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/configs/ddp.yaml recipes/run_clm.py"
    " --output_dir runs/clm --max_steps 100": "test_recipes.py",
    "lowbit report lightning_logs/version_0": "test_adaptive_pages.py, after the training that the page shows",
    "python -m pytest tests/gpu": "needs a GPU",
    "python benchmarks/gpu_kernels.py --json gpu.json": "needs a GPU",
    "python benchmarks/gpu_kernels.py --sweep --shard 0/8": "needs a GPU",
    "make gpu-acceptance": "test_gpu_acceptance.py, what a CPU can show",
    'make gpu-acceptance ARGS="--continue"': "test_gpu_acceptance.py, what a CPU can show",
    'make gpu-acceptance ARGS="--part ranks --part memory" # some of them': "test_gpu_acceptance.py",
}


@pytest.mark.parametrize("page", sorted(path.name for path in (REPOSITORY / "docs").glob("*.md")))
def test_every_command_is_run(page: str) -> None:
    here = {line for _, command in CASES for line in command.split(" && ")}
    machines = page in ("multi-node.md", "two-machines.md")  # test_machines.py takes its commands from there
    several = ("--machine_rank", "srun")  # likewise, from any page
    for line in filter(None, commands(page)):
        known = line in here or line in ELSEWHERE or machines or any(flag in line for flag in several)
        assert known, f"{page} has a command that no test runs: {line}"


SNIPPETS = """
import lightning as L, torch, lowbit_strategy
from accelerate import Accelerator
from lightning.pytorch import Trainer
from lowbit_strategy import *
from lowbit_strategy.accelerate import LowBitAccelerator, LowBitPlugin
from lowbit_strategy.control import *
"""
BEFORE_EACH = "accelerator = Accelerator(cpu=True)\n"  # takes one plugin


def test_snippets_construct(tmp_path: Path) -> None:
    """Blocks that are no whole file, on pages that no other test takes blocks from."""
    names = ("accelerate", "checkpoints", "choosing", "compressors", "fabric", "lightning", "outer-steps")
    found = [
        text
        for name in names
        for language, text in blocks(f"{name}.md")
        if language == "python" and not text.startswith("# ")
    ]
    assert len(found) >= 8
    script = tmp_path / "snippets.py"
    script.write_text(SNIPPETS + "".join(BEFORE_EACH + text for text in found))
    run_ranks(as_main, 1, script, [], {"ACCELERATE_USE_CPU": "true"}, tmp_path, process_group=None)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), CASES)
def test_commands(page: str, command: str, folders: dict[str, Path]) -> None:
    done = run_script(["bash", "-c", shorter(command)], cwd=folders[page], env=ON_CPU, timeout=280)
    if "lowbit report" in command:
        assert (folders[page] / command.split()[-1] / "report" / "index.html").is_file()
    if "lowbit doctor" in command:
        assert "over 8 ranks" in done.stdout
    else:
        assert "compressed gradient" in done.stderr  # the start-up report
        assert "loss" in done.stdout


@pytest.mark.slow
def test_start_up_reports_in_the_pages_are_what_runs_print() -> None:
    """Where this fails: ``python docs/samples.py``."""
    spec = importlib.util.spec_from_file_location("samples", REPOSITORY / "docs" / "samples.py")
    assert spec is not None
    assert spec.loader is not None
    samples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(samples)
    shown = [text for page in samples.PAGES if "<!-- sample: " in (text := page.read_text(encoding="utf-8"))]
    assert shown
    assert [samples.filled(text) for text in shown] == shown
