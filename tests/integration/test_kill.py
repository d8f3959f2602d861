"""A rank dies by SIGKILL in mid-run; the job, started again from its last checkpoint, is as if it never had."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lowbit_strategy import DiLoCo, EagerDiLoCo, LoCo
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.control import Accordion, Controller, GraVAC
from lowbit_strategy.lightning import AdaptiveCompression
from testing.processes.node_size import nodes_of
from testing.processes.ranks import run_ranks
from testing.training.comparing import fingerprint
from testing.training.regression import ByStep, Kind, SteadyTime, loader, strategy, trainer

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
    "eager": EagerDiLoCo(every=8, fragments=2, momentum=0.5, synchronous=1),
}


class Trained(NamedTuple):
    bits: int
    source: str


def train(
    rank: int, world_size: int, kind: Kind, folder: Path, kill_at: int | str | None, controller: str | None
) -> Trained:
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
    return Trained(fingerprint(model), newest.name if newest else "the start")


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


def _losses(folder: Path, rank: int) -> dict[int, str]:
    """The last that was written for each step."""
    lines = (folder / f"losses-{rank}.txt").read_text().splitlines()
    return {int(step): loss for step, loss in map(str.split, lines)}


@pytest.mark.parametrize(
    ("kind", "kill_at", "source", "world_size"),
    [
        pytest.param("ddp", 8, "step=6.ckpt", 2, marks=pytest.mark.slow),
        ("fsdp", 8, "step=6.ckpt", 2),
        pytest.param("hsdp", 8, "step=6.ckpt", 2, marks=pytest.mark.slow),
        pytest.param("ddp", "saving", "step=3.ckpt", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 8, "step=6.ckpt", 4, marks=pytest.mark.slow),
        pytest.param("fsdp", 8, "step=6.ckpt", 4, marks=pytest.mark.slow),  # two nodes
    ],
)
def test_resume_after_a_rank_was_killed(
    tmp_path: Path, kind: Kind, kill_at: int | str, source: str, world_size: int
) -> None:
    steps = _killed_and_resumed(tmp_path, kind, kill_at, source, world_size=world_size)
    assert all(step.endswith("/") for step in steps.values())  # no controller, no decisions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "controller"),
    [
        ("ddp", "accordion"),
        ("fsdp", "gravac"),
        ("fsdp", "accordion"),
        ("ddp", "gravac"),
    ],
)
def test_decisions_after_a_rank_was_killed_in_the_middle_of_a_phase(
    tmp_path: Path, kind: Kind, controller: str
) -> None:
    steps = _killed_and_resumed(tmp_path, kind, 8, "step=6.ckpt", controller)
    levels = [steps[step].partition("/")[2] for step in range(10)]
    assert len(set(levels)) > 1, levels  # something was decided
    assert levels[5] == levels[6]  # the checkpoint cut a phase


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["streaming", "eager"])
def test_local_steps_after_a_rank_was_killed_while_a_fragment_was_under_way(tmp_path: Path, rule: str) -> None:
    _killed_and_resumed(tmp_path, "ddp", 8, "step=6.ckpt", rule)
    saved = list((tmp_path / "broken" / "step=6.ckpt.lowbit").glob("*.pt"))
    assert len(saved) == 2
    for path in saved:
        (flight,) = _all(torch.load(path, weights_only=True), "flight")
        assert flight["age"] < flight["delay"]  # the checkpoint is from before it was applied


def _all(saved: Any, key: str) -> list[Any]:
    """What dicts within dicts have under `key`."""
    if not isinstance(saved, dict):
        return []
    return [saved[key]] if key in saved else [found for inner in saved.values() for found in _all(inner, key)]


def _killed_and_resumed(
    tmp_path: Path,
    kind: Kind,
    kill_at: int | str,
    source: str,
    controller: str | None = None,
    world_size: int = 2,
) -> dict[int, str]:
    """Compare with an uninterrupted run; returns the first rank's losses and decisions by step."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = run_ranks(train, world_size, kind, whole, None, controller, process_group=None)
    with pytest.raises(AssertionError, match="rank 1 died of SIGKILL"):
        run_ranks(train, world_size, kind, broken, kill_at, controller, process_group=None)
    resumed = run_ranks(train, world_size, kind, broken, None, controller, process_group=None)
    for rank in range(world_size):
        assert resumed[rank] == Trained(expected[rank].bits, source)
        assert _losses(broken, rank) == _losses(whole, rank)
        assert len(_losses(whole, rank)) == 10
    return _losses(whole, 0)
