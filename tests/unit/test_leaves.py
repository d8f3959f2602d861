"""Parts that can be left out: a copy of the package without them is imported, trains, and says what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit_strategy.leaves import NAMES

REPOSITORY = Path(__file__).resolve().parents[2]
LEAVES: dict[str, list[str]] = {}  # a folder or file, and its names in the package itself
for name, target in NAMES.items():
    LEAVES.setdefault(target.partition(":")[0].partition(".")[2], []).append(name)

# An editable installation would find in the repository what the copy lacks. Python imports this file when it starts.
ALONE = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
"""

# Imports every file of the copy, trains with the leaves' options left alone, and asks for each name that is missing.
PROGRAM = """
import importlib, json, pathlib, sys
import torch, torch.distributed as dist
import lowbit_strategy

root = pathlib.Path(lowbit_strategy.__file__).parent
assert str(root).startswith(sys.argv[1]), root
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    if "triton" not in parts and parts[-1] not in ("metrics", "pytorch_lightning", "lightning_fabric"):
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
from lowbit_strategy.custom_loop import compress

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compress(model, optimizer, lowbit_strategy.LoCo())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
said = {}
for name in json.loads(sys.argv[2]):
    try:
        getattr(lowbit_strategy, name)
    except AttributeError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def copied_without(leaves: list[str], folder: Path) -> Path:
    """A copy of the package, without compiled files and these leaves."""
    copy = folder / "lowbit_strategy"
    shutil.copytree(REPOSITORY / "lowbit_strategy", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sitecustomize.py").write_text(ALONE)
    for leaf in leaves:
        path = copy.joinpath(*leaf.split("."))
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    return folder


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "leaves", [list(LEAVES), *(pytest.param([leaf], marks=pytest.mark.slow) for leaf in LEAVES)], ids=",".join
)
def test_a_copy_without_a_leaf_trains_and_says_what_it_lacks(tmp_path: Path, leaves: list[str]) -> None:
    names = {name: leaf for leaf in leaves for name in LEAVES[leaf]}
    done = run_in(copied_without(leaves, tmp_path), "-c", PROGRAM, str(tmp_path), json.dumps(list(names)))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == names.keys()
    assert all(f"lowbit_strategy.{leaf}" in said[name] for name, leaf in names.items())


CORE_TESTS = ("codecs", "collectives", "control", "engine", "hooks", "methods", "model", "plan", "ranks", "telemetry")


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_the_core_s_unit_tests_pass_without_a_leaf(tmp_path: Path, leaf: str) -> None:
    folder = copied_without([leaf], tmp_path)
    for part in ("testing", "tests", "docs", "benchmarks"):
        shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    paths = [str(folder / "tests" / "unit" / each) for each in CORE_TESTS]
    done = run_in(folder, "-m", "pytest", "-q", "-x", *paths)
    assert done.returncode == 0, done.stdout[-3000:]
