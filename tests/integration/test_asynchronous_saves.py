"""Checkpoints that are written while training goes on: one that is replaced keeps its residuals until then."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lowbit_strategy.custom_loop import CHECKPOINT_KEY
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import fingerprint
from testing.training.regression import KINDS, ByStep, Kind, loader, strategy, trainer


class Held(TorchCheckpointIO):
    """Writes when it may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.may_write.wait(20)
        super().save_checkpoint(*args, **kwargs)


def steps(folder: Path) -> list[int]:
    """Of this rank's residual files."""
    found = folder.glob(f"one.ckpt.lowbit/step-*-rank-{dist.get_rank()}-of-2-*.pt")
    return sorted(int(path.name.split("-")[1]) for path in found)


class Saving(Callback):
    """Saves after 2, 5 and 7 steps under one name; the second checkpoint is not written at once."""

    def __init__(self, path: Path, held: Held) -> None:
        self.path, self.held = path, held
        self.kept: list[list[int]] = []
        self.in_file: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step not in (2, 5, 7):
            return
        if trainer.global_step == 5:
            self.held.may_write.clear()
        trainer.save_checkpoint(self.path)
        if trainer.global_step == 5:
            self.in_file.append(torch.load(self.path, weights_only=True)[CHECKPOINT_KEY]["step_index"])
            dist.barrier()
        self.kept.append(steps(self.path.parent))
        self.held.may_write.set()


def replaced(folder: Path, kind: Kind) -> Facts:
    held = Held()
    saving = Saving(folder / "one.ckpt", held)
    model, again = ByStep(), ByStep()
    trainer(strategy(kind), max_steps=9, plugins=[AsyncCheckpointIO(held)], callbacks=[saving]).fit(model, loader())
    dist.barrier()
    trainer(strategy(kind), max_steps=9).fit(again, loader(), ckpt_path=saving.path)
    return {"kept": saving.kept, "in file": saving.in_file, "same": fingerprint(again) == fingerprint(model)}


@scenarios(replaced, kind=KINDS)
def test_a_replaced_checkpoint_keeps_its_residuals_until_the_new_one_is_written(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["in file"] == [2]  # the run could be killed here
        assert rank["kept"] == [[2], [2, 5], [5, 7]]
        assert rank["same"]
