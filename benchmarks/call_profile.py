"""How long the way of a gradient is: calls of package functions, and the files they lie in.

    python -m benchmarks.call_profile --json call_profile.json

Two gloo ranks train a small model under DDP with one bucket. After some steps one backward pass is recorded by
`sys.setprofile` in all threads of rank 0:

* first: from DDP's call of the hook until the first collective begins
* bucket: from there until the bucket's future has its result
* import: modules that the name ``loco_fsdp`` loads, once per process, with their classes and decorators
* trainer: from ``Trainer(strategy="loco_fsdp")`` until FSDP2 has the first module's reduce-scatter, without the import
* package: lines and files

A call is what `sys.setprofile` reports as one: every resumption of a generator and every element of a generator
expression counts, calls of C and of other packages do not. Functions that `dataclass` generates have no file, and are
left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowbit_strategy
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.methods.registry import PRESETS
from testing.processes.ranks import run_ranks

PACKAGE = f"{Path(lowbit_strategy.__file__).parent}{os.sep}"
METHODS = ("loco", "loco4", "topk", "powersgd")
WARM_STEPS = 5
_COLLECTIVES = {"all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce", "broadcast"}


class Recorder:
    """Package functions that are called in any thread, in order."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self.marks: dict[str, int] = {}  # how many calls there were when something happened first
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            if "hook" in self.marks or code is DDPHook.reduce.__code__ or "trainer" in self.marks:
                self.marks.setdefault("hook", 0)
                self.calls.append(code)
        elif code.co_name in _COLLECTIVES and code.co_filename.endswith("distributed_c10d.py"):
            self.marks.setdefault("first", len(self.calls))
        elif code.co_name == "set_result" and code.co_filename.endswith(os.path.join("futures", "__init__.py")):
            self.marks.setdefault("bucket", len(self.calls))
        elif code.co_name == "set_custom_reduce_scatter":
            self.marks.setdefault("trainer_end", len(self.calls))

    def summary(self, end: int, start: int = 0) -> dict[str, Any]:
        calls = self.calls[start:end]
        files = Counter(code.co_filename.removeprefix(PACKAGE) for code in calls)
        names = [f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}" for code in calls]
        return {"calls": len(calls), "functions": len(set(names)), "files": len(files), "names": names}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def profile_bucket(rank: int, world_size: int, method: str) -> dict[str, Any]:
    recorder = Recorder()
    threading.setprofile(recorder)
    model = _model()
    prepared = prepare(model, PRESETS[method])
    wrapped = DistributedDataParallel(model)
    session = attach_ddp(wrapped, prepared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(WARM_STEPS + 1):
        loss = wrapped(torch.randn(8, 64)).square().mean()
        session.begin_step()
        recorder.is_on = step == WARM_STEPS
        sys.setprofile(recorder if recorder.is_on else None)
        loss.backward()
        sys.setprofile(None)
        recorder.is_on = False
        optimizer.step()
        session.end_step(optimizer)
        optimizer.zero_grad()
    threading.setprofile(None)
    session.close()
    return {part: recorder.summary(recorder.marks[part]) for part in ("first", "bucket")}


def profile_trainer(rank: int, world_size: int) -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    recorder = Recorder()
    recorder.marks["trainer"] = 0
    module, data = Module(), torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        recorder.is_on = True
        sys.setprofile(recorder)
        importlib.import_module("lowbit_strategy.lightning")
        imported = len(recorder.calls)
        trainer = Trainer(
            strategy="loco_fsdp",
            accelerator="cpu",
            devices=world_size,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, data)
        sys.setprofile(None)
    return {
        "import": recorder.summary(imported),
        "trainer": recorder.summary(recorder.marks["trainer_end"], imported),
    }


def package() -> dict[str, int]:
    files = list(Path(PACKAGE).rglob("*.py"))
    return {"files": len(files), "lines": sum(len(path.read_text().splitlines()) for path in files)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--names", action="store_true", help="print the calls, too")
    parser.add_argument("--trainer", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    found = {
        f"{part}, {method}": result
        for method in arguments.methods
        for part, result in run_ranks(profile_bucket, 2, method)[0].items()
    }
    if arguments.trainer:
        profiles = run_ranks(profile_trainer, 2, process_group=None, timeout=300)[0]
        found |= {f"{part}, loco_fsdp": result for part, result in profiles.items()}
    for label, result in found.items():
        names = result.pop("names")
        if arguments.names:
            print(f"\n{label}", *names, sep="\n  ")
    print(f"{'':20}  calls  functions  files")
    for label, result in found.items():
        print(f"{label:20} {result['calls']:6} {result['functions']:10} {result['files']:6}")
    size = package()
    print(f"package: {size['lines']} lines in {size['files']} files")
    if arguments.json:
        arguments.json.write_text(json.dumps(found | {"package": size}, indent=2) + "\n")


if __name__ == "__main__":
    main()
