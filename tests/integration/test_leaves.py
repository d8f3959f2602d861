"""Parts that nothing else needs: with each deleted in a copy of the package, the core imports and trains on two ranks,
and what asks for the part says that it is missing.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from lowbit_strategy.control import CONTROLLERS
from lowbit_strategy.leaves import NAMES, PARTS
from lowbit_strategy.methods.entries import CLASSES
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
    "zoo": Leaf(
        ("methods/zoo",),
        "from lightning import Trainer; Trainer(strategy='eden_ddp', accelerator='cpu', devices=1, logger=False)",
        "eden needs lowbit_strategy.methods.zoo, which this installation lacks",
    ),
    "rare controllers": Leaf(
        ("control/zoo", "adaptation/zoo"),
        "from lowbit_strategy.control import GraVAC",
        "GraVAC needs lowbit_strategy.control.zoo, which this installation lacks",
    ),
    "configuration files": Leaf(
        ("config_file", "run.py"), command("config"), "lowbit config needs lowbit_strategy.config_file"
    ),
    "metrics": Leaf(("metrics.py",), "import lowbit_strategy.metrics", "No module named 'lowbit_strategy.metrics'"),
    "functional": Leaf(
        ("functional.py",), "import lowbit_strategy.functional", "No module named 'lowbit_strategy.functional'"
    ),
    "lost ranks": Leaf(
        ("lost_ranks.py",), "import lowbit_strategy.lost_ranks", "No module named 'lowbit_strategy.lost_ranks'"
    ),
    "divergence": Leaf(
        ("divergence",),
        "from lowbit_strategy import DivergenceError",
        "DivergenceError needs lowbit_strategy.divergence, which this installation lacks",
    ),
    "elastic": Leaf(
        ("elastic",),
        "from lowbit_strategy.custom_loop import SyncOptions; SyncOptions(elastic={})",
        "elastic needs lowbit_strategy.elastic",
    ),
    "auto": Leaf(
        ("auto",),
        "from lightning import Trainer; Trainer(strategy='lowbit_ddp', accelerator='cpu', devices=1, logger=False)",
        "auto needs lowbit_strategy.auto",
    ),
    "far links": Leaf(
        ("far_links",),
        "from lowbit_strategy.custom_loop import SyncOptions; SyncOptions(far_links=True)",
        "far_links needs lowbit_strategy.far_links",
    ),
    "fitting": Leaf(
        ("fitting",),
        "from lowbit_strategy.custom_loop import SyncOptions; SyncOptions(memory=1.0)",
        "memory needs lowbit_strategy.fitting",
    ),
    "node codes": Leaf(
        ("node_codes",),
        "from lowbit_strategy.custom_loop import SyncOptions; SyncOptions(intra=8)",
        "intra needs lowbit_strategy.node_codes",
    ),
    "plan": Leaf(("plan",), "import lowbit_strategy.plan", "No module named 'lowbit_strategy.plan'"),
    "residual rules": Leaf(
        ("residual_rules",),
        "from lowbit_strategy.custom_loop import SyncOptions; SyncOptions(max_residual=3.0)",
        "max_residual needs lowbit_strategy.residual_rules",
    ),
    "second moment": Leaf(
        ("second_moment",),
        "from lowbit_strategy.lightning import LowBitDDPStrategy; LowBitDDPStrategy(second_moment=True)",
        "second_moment needs lowbit_strategy.second_moment",
    ),
    "local steps": Leaf(
        ("local_steps",),
        "from lowbit_strategy.custom_loop import SyncOptions; SyncOptions(outer='diloco')",
        "outer needs lowbit_strategy.local_steps",
    ),
}

STAND_ON = {"memory": ("plan",)}  # options whose leaf needs another one
LEAF_PATHS = [path for leaf in LEAVES.values() for path in leaf.paths]


def module_of(path: str) -> str:
    """The module of a file or a folder below the package."""
    return f"lowbit_strategy.{path.removesuffix('.py').replace('/', '.')}"


# Every file of the core is imported, once; two processes with gloo come from a fork. The arguments: the copy, and the
# leaves, whose files may need each other.
CORE = """
import importlib, os, pathlib, sys, tempfile, torch, torch.distributed as dist
from torch import nn
import lowbit_strategy

root = pathlib.Path(lowbit_strategy.__file__).parent
assert str(root).startswith(sys.argv[1]), root
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    if not {"triton", *sys.argv[2:]} & {*parts, str(path.relative_to(root))}:
        name = ".".join(("lowbit_strategy", *(parts[:-1] if parts[-1] == "__init__" else parts)))
        if not name.endswith(("pytorch_lightning", "lightning_fabric")):
            importlib.import_module(name)
lowbit_strategy.__all__
from lowbit_strategy import LoCo
from lowbit_strategy.custom_loop import compress, monitor

def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = compress(net, optimizer, LoCo(bits=4))
    observer = monitor(session.sync, None, every_n_steps=1, record=file + "-record")
    losses = []
    for step in range(4):
        loss = net(torch.full((2, 64), 1.0 + rank)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert 0 < observer.last.total.relative_error < 1
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


# What each program leaves on stderr, and whether it has failed; frameworks are imported once.
ASK = """
import json, os, sys, traceback
import torch, lightning, lowbit_strategy

answers = []
for program in sys.argv[1:]:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(writing, 2)
        try:
            exec(program)
            status = 0
        except SystemExit as end:
            status = 1 if end.code else 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    os.close(writing)
    with open(reading) as said:
        answers.append((said.read(), os.waitpid(pid, 0)[1]))
print(json.dumps([(status, text) for text, status in answers]))
"""


# An editable installation finds in its own folder what the copy lacks.
NOT_INSTALLED = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"


def without(leaves: Iterable[Leaf], folder: Path) -> Path:
    """A copy of the package without these leaves, by links to its files."""
    shutil.copytree(REPOSITORY / "lowbit_strategy", folder / "lowbit_strategy", copy_function=os.symlink)
    for path in (folder / "lowbit_strategy" / each for leaf in leaves for each in leaf.paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=env, cwd=folder, capture_output=True, text=True, timeout=900)


EACH = [pytest.param((name,), id=name, marks=pytest.mark.slow) for name in LEAVES]


@pytest.mark.parametrize("names", [pytest.param(tuple(LEAVES), id="all"), *EACH])
def test_the_core_trains_without_it_and_its_name_says_what_is_missing(names: tuple[str, ...], tmp_path: Path) -> None:
    leaves = [LEAVES[name] for name in names]
    folder = without(leaves, tmp_path)
    done = run(folder, "-c", CORE, str(folder), *LEAF_PATHS)
    assert done.stdout.endswith("trained\n"), done.stderr
    deleted = {f"lowbit_strategy.{path}" for leaf in leaves for path in leaf.paths}
    for option, needed in PARTS.items():  # what nobody has asked for and is not done: one of two ranks says so
        needs = {module_of(each) for each in STAND_ON.get(option, ())} | {needed.target.partition(":")[0]}
        missing = needed.unasked and any(each.startswith(tuple(deleted)) for each in needs)
        assert done.stderr.count(f"this run goes without {needed.unasked}:") == bool(missing), done.stderr
    assert done.stderr.count("sent by a rank") == ("plan" not in names), done.stderr
    assert done.stderr.count("goes without its record") == ("report" in names), done.stderr
    asked = run(folder, "-c", ASK, *(leaf.use for leaf in leaves))
    assert asked.returncode == 0, asked.stderr
    for leaf, (status, said) in zip(leaves, json.loads(asked.stdout.splitlines()[-1]), strict=True):
        assert status != 0
        assert leaf.says in said


def test_doctor_says_what_reads_configuration_files(tmp_path: Path) -> None:
    """What is missing shows only when the command is at work."""
    folder = without([LEAVES["configuration files"]], tmp_path)
    done = run(folder, "-c", command("doctor", "--config", "job.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("lowbit doctor --config needs lowbit_strategy.config_file"), done.stderr


CORE_TESTS = ("attach", "checkpoint", "codecs", "collectives", "control", "engine", "hooks", "methods", "model",
              "ranks", "telemetry")  # fmt: skip


def imported(path: Path) -> set[str]:
    """What a file imports of the package and of `testing`: modules, and names in them; with what `testing` and leaves
    import, which may stand on another leaf.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    for name in [each for each in found if each.startswith(("testing.", *map(module_of, LEAF_PATHS)))]:
        below = REPOSITORY.joinpath(*name.split(".")).with_suffix(".py")
        if below.is_file():
            found |= imported(below)
    return found


def needs(path: Path, leaf: Leaf) -> bool:
    """Whether a test imports something of the leaf: then it is one of the leaf's."""
    modules = tuple(map(module_of, leaf.paths))
    entries = NAMES | CLASSES | {f"control.{cls.__name__}": cls.__module__ for cls in CONTROLLERS.values()}
    names = {f"lowbit_strategy.{name}" for name, target in entries.items() if target.startswith(modules)}
    below = tuple(f"{module}." for module in modules)
    return any(each in names or f"{each}.".startswith(below) for each in imported(path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LEAVES)
def test_the_core_s_tests_pass_without_it(name: str, tmp_path: Path) -> None:
    folder = without([LEAVES[name]], tmp_path)
    for room in ("tests", "testing", "benchmarks", "recipes", "docs"):
        shutil.copytree(REPOSITORY / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    tests = [path for each in CORE_TESTS for path in (folder / "tests" / "unit" / each).rglob("test_*.py")]
    core = [str(path) for path in tests if not needs(path, LEAVES[name])]
    assert len(core) > len(tests) / 2
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", *core)
    assert done.returncode == 0, done.stdout[-3000:]
