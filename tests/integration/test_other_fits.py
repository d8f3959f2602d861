"""Further fits of one Trainer, and checkpoints of another strategy: what fits goes on, the rest is said once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowbit_strategy import PRESETS, Auto, DiLoCo
from lowbit_strategy.auto import choice as running
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from testing.processes.ranks import join_group, run_ranks
from testing.training.auto import settled
from testing.training.comparing import fingerprint
from testing.training.regression import MIN_SHARD_NUMEL, ByStep, Regression, loader, strategy, trainer


class _FirstOutputs(Regression):
    """Whatever the number of outputs."""

    def loss(self, batch: Any) -> torch.Tensor:
        out = self(batch[0])
        return F.mse_loss(out, batch[1][:, : out.shape[1]])


def _strategy(kind: str, *args: Any, **options: Any) -> Any:
    if kind == "ddp":
        return LowBitDDPStrategy(*args, **options)
    sharded = {"shard_size": 1} if kind == "hsdp" else {}
    return LowBitFSDPStrategy(*args, min_shard_numel=MIN_SHARD_NUMEL, **options, **sharded)


class _Said(logging.Handler):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.count = part, 0
        logging.getLogger("lowbit_strategy").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += self.part in record.getMessage()


def _changed_model(rank: int, world_size: int, folder: Path) -> list[tuple[int, Any]]:
    join_group(rank, world_size, folder, 60)
    found = []
    for options in ({}, {"outer": DiLoCo(every=3)}, {"second_moment": True}):
        torch.manual_seed(0)
        said = _Said("the model has changed since compression was first attached")
        model = _FirstOutputs()
        fitting = trainer(strategy("ddp", **options), max_steps=4)
        fitting.fit(model, loader())
        model.net[4] = nn.Linear(64, 3)  # type: ignore[operator]
        fitting.fit_loop.epoch_loop.max_steps = 8
        fitting.fit(model, loader())
        found.append((said.count, fingerprint(model)))
    return found


def test_the_model_changes_between_two_fits(tmp_path: Path) -> None:
    first, second = run_ranks(_changed_model, 2, tmp_path, process_group=None)
    assert [count for count, _ in first] == [1, 1, 1]
    assert [weights for _, weights in first] == [weights for _, weights in second]


def _squares(rank: int, world_size: int, folder: Path) -> list[int]:
    """A checkpoint with squares goes from one layout to the next."""
    join_group(rank, world_size, folder, 60)
    said, counts, path = _Said("squares were kept"), [], None
    for at, kind in enumerate(("ddp", "fsdp", "hsdp", "hsdp", "ddp")):
        fitting = trainer(_strategy(kind, PRESETS["loco2"], second_moment=True), max_steps=4 * (at + 1))
        fitting.fit(ByStep(), loader(), ckpt_path=path)
        path = folder / f"{at}.ckpt"
        fitting.save_checkpoint(path)
        counts.append(said.count)
    return counts


def test_squares_of_another_layout_begin_anew(tmp_path: Path) -> None:
    of_first, _ = run_ranks(_squares, 2, tmp_path, process_group=None)
    assert of_first == [0, 1, 2, 2, 2]  # with a model on each rank HSDP keeps what DDP does


def _while_trying(rank: int, world_size: int, folder: Path, kind: str) -> tuple[Any, ...]:
    join_group(rank, world_size, folder, 60)
    torch.manual_seed(0)
    model = ByStep()
    with settled(0), mock.patch.object(running, "LOOK_EVERY", 4):
        fitting = trainer(_strategy(kind, Auto()), max_steps=15)
        fitting.fit(model, loader(96 * 12))
        before = fitting.strategy.session.pace.phase
        fitting.fit_loop.epoch_loop.max_steps = 30
        fitting.fit(model, loader(96 * 12))
    return before, fitting.global_step, fingerprint(model)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_fit_ends_while_a_candidate_is_tried(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(_while_trying, 2, tmp_path, kind, process_group=None)
    assert first == second
    assert first[:2] == ("try", 30)
