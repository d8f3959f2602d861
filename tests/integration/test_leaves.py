"""Parts that nothing else needs: with each deleted in a copy of the package, the core imports and trains on two ranks,
and what asks for the part says that it is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from testing.processes.scripts import REPOSITORY


class Leaf(NamedTuple):
    """One part.

    Args:
        paths: What is deleted, below the package.
        use: A program that asks for it.
        says: What that program's error has in it.
    """

    paths: tuple[str, ...]
    use: str
    says: str


def command(*arguments: str) -> str:
    return f"import sys; sys.argv = ['lowbit', *{arguments!r}]; from lowbit_strategy.cli import main; main()"


LEAVES = {  # one row per leaf
    "advisor": Leaf(("advisor",), command("advise", "--params", "1e9"), "lowbit advise needs lowbit_strategy.advisor"),
    "report": Leaf(("report",), command("report", "runs"), "lowbit report needs lowbit_strategy.report"),
    "doctor": Leaf(("doctor",), command("doctor", "--strict"), "lowbit doctor needs lowbit_strategy.doctor"),
    "functional": Leaf(
        ("functional.py",), "import lowbit_strategy.functional", "No module named 'lowbit_strategy.functional'"
    ),
}

# The core is imported once; two processes with gloo come from a fork.
CORE = """
import os, sys, tempfile, torch, torch.distributed as dist
from torch import nn
import lowbit_strategy, lowbit_strategy.cli, lowbit_strategy.exports, lowbit_strategy.extend, lowbit_strategy.register
from lowbit_strategy import LoCo, control
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.attach import session
from lowbit_strategy.checkpoint import capture, loading
from lowbit_strategy.telemetry import model_control, startup_report

assert lowbit_strategy.__file__.startswith(sys.argv[1]), lowbit_strategy.__file__

def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = compress(net, optimizer, LoCo(bits=4))
    losses = []
    for step in range(4):
        loss = net(torch.full((2, 64), 1.0 + rank)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    session.close()
    dist.destroy_process_group()

with tempfile.TemporaryDirectory() as folder:
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            try:
                train(rank, f"{folder}/meet")
                os._exit(0)
            except BaseException:
                import traceback; traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
assert statuses == [0, 0], statuses
print("trained")
"""


# An editable installation finds in its own folder what the copy lacks.
NOT_INSTALLED = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"


def without(leaf: Leaf, folder: Path) -> Path:
    """A copy of the package without the leaf, by links to its files."""
    shutil.copytree(REPOSITORY / "lowbit_strategy", folder / "lowbit_strategy", copy_function=os.symlink)
    for path in (folder / "lowbit_strategy" / each for each in leaf.paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    return folder


def run(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("name", LEAVES)
def test_the_core_trains_without_it_and_its_name_says_what_is_missing(name: str, tmp_path: Path) -> None:
    leaf = LEAVES[name]
    folder = without(leaf, tmp_path)
    done = run(folder, CORE, str(folder))
    assert done.stdout.endswith("trained\n"), done.stderr
    asked = run(folder, leaf.use)
    assert asked.returncode != 0
    assert leaf.says in asked.stderr


CORE_TESTS = ("unit/engine", "unit/collectives", "unit/codecs", "unit/control", "unit/checkpoint", "unit/hooks")


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_the_core_s_tests_pass_without_it(name: str, tmp_path: Path) -> None:
    folder = without(LEAVES[name], tmp_path)
    for room in ("tests", "testing", "benchmarks", "recipes"):
        shutil.copytree(REPOSITORY / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    tests = [str(folder / "tests" / each) for each in CORE_TESTS]
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=env, cwd=folder, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
