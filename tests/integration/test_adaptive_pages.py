"""The pages on adaptive compression and monitoring: every block of Python as it stands, the first ones in training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.processes.ranks import run_ranks
from testing.processes.scripts import REPOSITORY, as_main, run_script

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRELUDE = """
import lightning as L, torch, lowbit_strategy
from lightning.pytorch import Trainer
from lowbit_strategy import *
from lowbit_strategy.control import *
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor
from testing.training.regression import Regression, loader
model = Regression(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8)))
controller = Accordion(light=LoCo(bits=8), heavy=LoCo(bits=2))
"""
TRAIN = "\ntrainer.fit_loop.max_epochs = 7\ntrainer.fit(model, loader())\n"
FABRIC = """
fabric = L.Fabric(accelerator="cpu", devices=1, strategy="loco_ddp")
fabric.launch()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
{block}
for x, y in loader():
    optimizer.zero_grad()
    fabric.backward((model(x) - y).square().mean())
    optimizer.step()
assert driver.labels == ("loco(bits=8)", "loco(bits=2)")  # with one rank there is nothing to decide
"""
METRIC = """
from types import SimpleNamespace
logged = {{}}
self, gradient = SimpleNamespace(log=lambda name, metric: logged.update({{name: metric.compute()}})), torch.randn(99)
{block}
assert 0 < logged["rounding"] < 0.01
"""


def blocks(page: str) -> list[str]:
    return _BLOCK.findall((REPOSITORY / "docs" / page).read_text(encoding="utf-8"))


def run(code: str, folder: Path) -> None:
    (folder / "page.py").write_text(PRELUDE + code)
    run_ranks(as_main, 1, "page.py", [], {}, folder, timeout=200, process_group=None)


def test_what_the_pages_construct(tmp_path: Path) -> None:
    choosing = [block for block in blocks("adaptive.md")[1:] if "fabric" not in block]
    watching = [block for block in blocks("monitoring.md")[1:] if "self." not in block]
    assert (len(choosing), len(watching)) == (5, 1)
    metric = next(block for block in blocks("monitoring.md") if "self." in block)
    run("\n".join([*choosing, *watching]) + METRIC.format(block=metric), tmp_path)


@pytest.mark.slow
def test_training_and_its_report(tmp_path: Path) -> None:
    run(blocks("adaptive.md")[0] + TRAIN, tmp_path)
    done = run_script(["lowbit", "report", "lightning_logs/version_0"], cwd=tmp_path)
    assert (tmp_path / "lightning_logs" / "version_0" / "report" / "index.html").is_file(), done.stdout
    run(blocks("monitoring.md")[0] + TRAIN, tmp_path)
    assert (tmp_path / "lightning_logs" / "version_1" / "lowbit.jsonl").is_file()


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    run(FABRIC.format(block=next(block for block in blocks("adaptive.md") if "fabric" in block)), tmp_path)
