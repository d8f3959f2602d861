"""A job that goes on from its last checkpoint when it is started again.

``resumable.py KIND FOLDER [KILL_AT [CONTROLLER]]`` writes every step's loss, with a controller its decisions too, to
``FOLDER/losses-RANK.txt``. With KILL_AT the second rank kills itself at that step; with ``saving`` while it writes its
residuals for the second time; with ``-`` it does not.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lowbit_strategy import LoCo
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.control import Accordion, Controller, GraVAC
from lowbit_strategy.lightning import AdaptiveCompression
from tests.training import ByStep, fingerprint, loader, strategy, trainer

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
KILL_AT, CONTROLLER = (*sys.argv[3:], "", "")[:2]
STEPS, EVERY = 10, 3
EIGHT, FOUR, TWO = (LoCo(bits=bits, block_size=32) for bits in (8, 4, 2))
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    # A window from step 4 to 7, which a checkpoint cuts, and a decision at step 8, which the kill cuts off.
    "accordion": lambda: Accordion(light=EIGHT, heavy=TWO, interval=4, unit="steps", eta=10.0),
    "gravac": lambda: GraVAC(candidates=(EIGHT, FOUR, TWO), epsilon=0.1, settle=1, window=3, omega=0.0),
}


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

    residual_files.torch = type("torch", (), {"save": staticmethod(interrupted), "load": staticmethod(torch.load)})


class Job(ByStep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if KILL_AT.isdigit() and self.global_rank == 1 and self.global_step == int(KILL_AT):
            kill()
        self.last_loss = super().training_step(batch, batch_idx)
        return self.last_loss

    def on_train_batch_end(self, *_: Any) -> None:
        driver = adaptive.driver if adaptive is not None else None
        levels = ",".join(map(str, driver.levels.values())) if driver is not None else ""
        with (FOLDER / f"losses-{self.global_rank}.txt").open("a") as file:
            file.write(f"{self.global_step - 1} {float(self.last_loss.detach()).hex()}/{levels}\n")


class SteadyTime(Callback):
    """Every step takes a second: decisions from measured times would differ from run to run, killed or not."""

    def on_train_start(self, *_: Any) -> None:
        assert adaptive is not None
        assert adaptive.driver is not None
        adaptive.driver.timer = itertools.count().__next__


if __name__ == "__main__":
    if KILL_AT == "saving" and os.environ["RANK"] == "1":
        kill_while_saving()
    torch.manual_seed(0)
    saver = ModelCheckpoint(FOLDER, every_n_train_steps=EVERY, save_top_k=-1, filename="{step}")
    adaptive = AdaptiveCompression(CONTROLLERS[CONTROLLER](), record=False) if CONTROLLER else None
    callbacks = [saver, adaptive, SteadyTime()] if adaptive is not None else [saver]
    made = trainer(strategy(KIND, LoCo(block_size=32)), max_steps=STEPS, enable_checkpointing=True, callbacks=callbacks)
    newest = max(FOLDER.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)
    model = Job()
    made.fit(model, loader(), ckpt_path=newest)
    text = f"{fingerprint(model)} from {newest.name if newest else 'the start'}"  # on all ranks: FSDP2 gathers
    if made.is_global_zero:
        print("finished", text)
    dist.destroy_process_group()
