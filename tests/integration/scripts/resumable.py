"""A job that goes on from its last checkpoint when it is started again; on request a rank of it kills itself."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lowbit_strategy import DiLoCo, EagerDiLoCo, LoCo
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.control import Accordion, Controller, GraVAC
from lowbit_strategy.lightning import AdaptiveCompression
from tests.nodes import nodes_of
from tests.training import ByStep, Kind, SteadyTime, fingerprint, loader, strategy, trainer

STEPS, EVERY = 10, 3
EIGHT, FOUR, TWO = (LoCo(bits=bits, block_size=32) for bits in (8, 4, 2))
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    # A window from step 4 to 7, which a checkpoint cuts, and a decision at step 8, which the kill cuts off.
    "accordion": lambda: Accordion(light=EIGHT, heavy=TWO, interval=4, unit="steps", eta=10.0),
    "gravac": lambda: GraVAC(candidates=(EIGHT, FOUR, TWO), epsilon=0.1, settle=1, window=3, omega=0.0),
}

# Turns after steps 5 and 10, applied two steps later: a checkpoint after step 6 is in the middle of a round, and of a
# fragment's way.
OUTER = {
    "streaming": DiLoCo(every=10, fragments=2, delay=2, mix=0.5, momentum=0.5),
    "eager": EagerDiLoCo(every=8, fragments=2, momentum=0.5, synchronous=1, synchronous_end=1, num_steps=10),
}


def train(
    rank: int, world_size: int, kind: Kind, folder: Path, kill_at: int | str | None, controller: str | None
) -> tuple[int, str]:
    """Ten steps in all, from the newest checkpoint in `folder`: the model's bits, and where the run began.

    `controller` may also name local steps. ``losses-RANK.txt`` gets every step's loss, with a controller its decisions
    too. With `kill_at` the second rank kills itself at that step; with ``saving`` while it writes its residuals for the
    second time.
    """
    if kill_at == "saving" and rank == 1:
        _kill_while_saving()
    torch.manual_seed(0)
    saver = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=-1, filename="{step}")
    adaptive = AdaptiveCompression(CONTROLLERS[controller](), record=False) if controller in CONTROLLERS else None
    options = {"outer": OUTER[controller]} if controller in OUTER else {}
    callbacks = [saver] if adaptive is None else [saver, adaptive, SteadyTime(adaptive)]
    if kind == "fsdp":
        options["weights"] = "delta4"
    chosen = strategy(kind, LoCo(block_size=32), **options)
    made = trainer(chosen, max_steps=STEPS, enable_checkpointing=True, callbacks=callbacks)
    newest = max(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]), default=None)
    model = _Job(folder, kill_at, adaptive)
    with nodes_of(2) if world_size == 4 else contextlib.nullcontext():
        made.fit(model, loader(), ckpt_path=newest)
    return fingerprint(model), newest.name if newest else "the start"


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_while_saving() -> None:
    written, save = [], torch.save

    def interrupted(saved: Any, file: Any) -> None:
        written.append(1)
        if len(written) == 2:
            file.write(b"half of it")
            _kill()
        save(saved, file)

    residual_files.torch = type("torch", (), {"save": staticmethod(interrupted), "load": staticmethod(torch.load)})


class _Job(ByStep):
    def __init__(self, folder: Path, kill_at: int | str | None, adaptive: AdaptiveCompression | None) -> None:
        super().__init__()
        self._folder, self._kill_at, self._adaptive = folder, kill_at, adaptive

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.global_step == self._kill_at:
            _kill()
        self.last_loss = super().training_step(batch, batch_idx)
        return self.last_loss

    def on_train_batch_end(self, *_: Any) -> None:
        driver = self._adaptive.driver if self._adaptive is not None else None
        levels = ",".join(map(str, driver.levels.values())) if driver is not None else ""
        with (self._folder / f"losses-{self.global_rank}.txt").open("a") as file:
            file.write(f"{self.global_step - 1} {float(self.last_loss.detach()).hex()}/{levels}\n")
