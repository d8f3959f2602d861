"""A job that goes on from its last checkpoint when it is started again: ``resumable.py KIND FOLDER [KILL_AT]``.

It writes every step's loss to ``FOLDER/losses-RANK.txt``. With KILL_AT the second rank kills itself at that step; with
``saving`` while it writes its residuals for the second time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lowbit_strategy import LoCo
from lowbit_strategy.hooks import sidecar
from tests.training import ByStep, fingerprint, loader, strategy, trainer

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
KILL_AT = sys.argv[3] if len(sys.argv) > 3 else ""
STEPS, EVERY = 10, 3


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_saving() -> None:
    written, save = [], torch.save

    def interrupted(saved: Any, file: Any) -> None:
        written.append(1)
        if len(written) == 2:
            file.write(b"half of it")
            kill()
        save(saved, file)

    sidecar.torch = type("torch", (), {"save": staticmethod(interrupted), "load": staticmethod(torch.load)})


class Job(ByStep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if KILL_AT.isdigit() and self.global_rank == 1 and self.global_step == int(KILL_AT):
            kill()
        loss = super().training_step(batch, batch_idx)
        with (FOLDER / f"losses-{self.global_rank}.txt").open("a") as file:
            file.write(f"{self.global_step} {float(loss.detach()).hex()}\n")
        return loss


if __name__ == "__main__":
    if KILL_AT == "saving" and os.environ["RANK"] == "1":
        kill_while_saving()
    torch.manual_seed(0)
    saver = ModelCheckpoint(FOLDER, every_n_train_steps=EVERY, save_top_k=-1, filename="{step}")
    made = trainer(strategy(KIND, LoCo(block_size=32)), max_steps=STEPS, enable_checkpointing=True, callbacks=[saver])
    newest = max(FOLDER.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)
    model = Job()
    made.fit(model, loader(), ckpt_path=newest)
    text = f"{fingerprint(model)} from {newest.name if newest else 'the start'}"  # on all ranks: FSDP2 gathers
    if made.is_global_zero:
        print("finished", text)
