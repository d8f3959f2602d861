"""The pages' commands for several machines, with two "machines" of one process each on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testing.pages import blocks, commands, files
from testing.processes.ranks import free_port
from testing.processes.scripts import REPOSITORY, run_script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the commands are made small for CPU")

SRUN = """\
#!/bin/bash
export SLURM_JOB_ID=1 SLURM_JOB_NAME=job SLURM_NNODES=2 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_LOCALID=0
export SLURM_NODELIST=127.0.0.1 SLURM_JOB_NODELIST=127.0.0.1
SLURM_NODEID=0 SLURM_PROCID=0 "$@" &
SLURM_NODEID=1 SLURM_PROCID=1 "$@" && wait $!
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"


@pytest.fixture
def port() -> str:
    return str(free_port())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The scripts, and a SLURM of two machines."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(folder: Path, command: str, port: str) -> subprocess.CompletedProcess[str]:
    for written, here in (
        ("10.0.0.1", "127.0.0.1"),
        ("29500", port),
        ("29400", port),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("--num_processes 16", "--num_processes 2"),
    ):
        command = command.replace(written, here)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"PATH": path, "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    return run_script(["bash", "-c", command], cwd=folder, env=env, timeout=280)


def together(pair: list[str]) -> str:
    """On the first machine and on the second."""
    first, second = pair
    return f"{first} & {second} && wait $!"


def lightning(folder: Path, port: str, command: str) -> None:
    (folder / "train.py").write_text(files("two-machines.md")["train.py"])
    done = run(folder, command, port)
    assert "reduce-scatter over 2 ranks" in done.stderr
    assert "max_epochs=1` reached" in done.stderr


ON_BOTH = [line for line in commands("multi-node.md") if "rdzv" in line] * 2
BY_RANK = [line for line in commands("multi-node.md") if "--node-rank" in line and "10.0.0.1" in line]
TWO_MACHINES = [line for line in commands("two-machines.md") if "--node-rank" in line]
VARIABLES = [line for line in commands("multi-node.md") if "NODE_RANK=" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [ON_BOTH, BY_RANK, TWO_MACHINES, VARIABLES], ids=["rendezvous", "ranks", "two machines", "variables"]
)
def test_lightning(pair: list[str], folder: Path, port: str) -> None:
    lightning(folder, port, together(pair))


@pytest.mark.slow
def test_lightning_under_slurm(folder: Path, port: str) -> None:
    (job,) = [text for language, text in blocks("multi-node.md") if language == "bash"]
    (folder / "job.sh").write_text(job)
    lightning(folder, port, "bash job.sh")


def accelerate(folder: Path, port: str, command: str) -> None:
    for name in ("train.py", "job.yaml"):
        (folder / name).write_text(files("accelerate.md")[name])
    done = run(folder, command, port)
    assert "over 2 ranks" in done.stderr
    assert done.stdout.count("epoch 2  loss") == 2  # Accelerate prints on every machine


@pytest.mark.slow
@pytest.mark.parametrize("page", ["accelerate.md", "multi-node.md"], ids=["recipe", "flags"])
def test_accelerate(page: str, folder: Path, port: str) -> None:
    pair = [line for line in commands(page) if "--machine_rank" in line and "srun" not in line]
    here = f"--num_processes 2 --mixed_precision no --main_process_ip 127.0.0.1 --main_process_port {port} train.py"
    if page == "accelerate.md":  # for eight GPUs each
        pair = [line.replace("recipes/", f"{REPOSITORY}/recipes/").replace("train.py", here) for line in pair]
    accelerate(folder, port, together(pair))


@pytest.mark.slow
def test_accelerate_under_slurm(folder: Path, port: str) -> None:
    (command,) = [line for line in commands("accelerate.md") if line.startswith("srun")]
    accelerate(folder, port, command)
