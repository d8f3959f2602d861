"""Resuming on another number of ranks: from two to three and back, residuals forgotten or folded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy import LoCo
from testing.log import listen
from testing.processes.ranks import run_ranks
from testing.training.comparing import fingerprint
from testing.training.regression import KINDS, ByStep, Kind, loader, strategy, trainer

POLICIES = ("reset", "fold")
NAMES = ("net.0.weight", "net.2.weight")
COMPRESSOR = LoCo(block_size=32, residual="float32", reset_steps=None)


class Seen(NamedTuple):
    """One rank's residuals when its training starts and when it ends, and what it became."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    print: int
    steps: int
    log: str


class _AtStart(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.residuals = _residuals(trainer)


def _residuals(trainer: Any) -> dict[str, Tensor]:
    sync = trainer.strategy.sync
    return {name: sync.state.export_unsent(name) for name in NAMES}


def _run(rank: int, world_size: int, folder: Path, resumed: bool, save: bool) -> dict[tuple[str, str], Seen]:
    dist.init_process_group("gloo", f"file://{folder}/store-{world_size}-{resumed}", rank=rank, world_size=world_size)
    seen = {}
    for kind in KINDS:
        for policy in POLICIES if resumed else ("reset",):
            torch.manual_seed(0)
            model, at_start = ByStep(), _AtStart()
            with listen() as lines:
                made = trainer(
                    strategy(kind, COMPRESSOR, on_world_size_change=policy, second_moment=True),
                    max_steps=8 if resumed else 4,
                    callbacks=[at_start],
                )
                made.fit(model, loader(), ckpt_path=folder / f"{kind}.ckpt" if resumed else None)
            ended = _residuals(made)
            seen[kind, policy] = Seen(at_start.residuals, ended, fingerprint(model), made.global_step, "\n".join(lines))
        if save:
            made.save_checkpoint(folder / f"{kind}.ckpt")
    return seen


Ranks = list[dict[tuple[str, str], Seen]]


@functools.cache
def _change(folder: Path, before: int, after: int) -> tuple[Ranks, Ranks]:
    folder = folder / f"{before}-{after}"
    folder.mkdir()
    first = run_ranks(_run, before, folder, False, True, process_group=None, timeout=120)
    return first, run_ranks(_run, after, folder, True, False, process_group=None, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world-size")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 3, marks=pytest.mark.slow), (3, 2)])
def test_reset_starts_from_zero(folder: Path, before: int, after: int, kind: Kind) -> None:
    _, seconds = _change(folder, before, after)
    for rank in (rank[kind, "reset"] for rank in seconds):
        assert not any(unsent.any() for unsent in rank.start.values())
        assert rank.steps == 8
        assert rank.print == seconds[0][kind, "reset"].print
    log = seconds[0][kind, "reset"].log
    assert f"the number of ranks changed from {before} to {after}: compression residuals start from zero" in log


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 3, marks=pytest.mark.slow), (3, 2)])
def test_fold_keeps_what_has_not_been_sent(folder: Path, before: int, after: int, kind: Kind) -> None:
    firsts, seconds = _change(folder, before, after)
    for name in NAMES:
        unsent = torch.stack([rank[kind, "reset"].end[name] for rank in firsts]).mean(0)
        now = torch.stack([rank[kind, "fold"].start[name] for rank in seconds]).mean(0)
        assert unsent.any()
        torch.testing.assert_close(now, unsent)
    for rank in (rank[kind, "fold"] for rank in seconds):
        assert rank.steps == 8
        assert rank.print == seconds[0][kind, "fold"].print
    log = seconds[0][kind, "fold"].log
    assert (
        f"the number of ranks changed from {before} to {after}: compression residuals are averaged over the old ranks"
        in log
    )
