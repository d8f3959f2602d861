"""One rank ends, or does something that the others do not: the error says which rank, and what differs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import DiLoCo, LoCo
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, prepare
from testing.processes.ranks import free_port, join_group, run_ranks
from testing.training.ddp_loop import CPU
from testing.training.regression import Kind, Regression, loader, mlp, strategy, trainer

TIMEOUT_S = 5


class Unequal(Regression):
    """Rank 1 is the one that differs, from the third step on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step == 3:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise ArithmeticError("an error of the user's own")
            if self.how == "pauses":
                time.sleep(8 * TIMEOUT_S)
        return super().training_step(batch, batch_idx)


def _lose_the_store(rank: int, world_size: int, folder: Path, port: int) -> None:
    """Rank 0, whose process holds the store, is killed within training."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        timeout=timedelta(seconds=TIMEOUT_S),
        rank=rank,
        world_size=world_size,
    )
    model = Regression()
    if rank == 0:
        model.on_train_batch_end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    trainer(strategy("ddp"), max_steps=40).fit(model, loader())


def test_where_the_store_has_ended_no_rank_is_accused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(_lose_the_store, 2, tmp_path, free_port(), timeout=60, process_group=None)
    text = str(error.value)
    assert "The store of the process group has ended as well" in text
    assert "did not answer" not in text


def _train(rank: int, world_size: int, folder: Path, kind: Kind, how: str) -> None:
    join_group(rank, world_size, folder, TIMEOUT_S)
    given: dict[str, Any] = {"max_steps": 40}
    options: dict[str, Any] = {}
    if how in OPTIONS and rank == 1:
        given |= OPTIONS[how]
    if how == "outer":
        how, options["outer"] = "dies", DiLoCo(every=2)
    if how == "exact":
        how, options["weights"] = "dies", "exact"
    if how.startswith("far"):
        how, options["far_links"] = how.removeprefix("far "), True
    model = Unequal(how)
    if how == "validates" and rank == 1:
        trainer(strategy(kind, **options), **given).fit(model, loader(), loader())
    trainer(strategy(kind, **options), **given).fit(model, loader())


OPTIONS: dict[str, dict[str, Any]] = {"accumulates": {"accumulate_grad_batches": 3}}
CASES = [
    ("ddp", "dies", "rank 1 did not answer", "optimizer step 4"),
    pytest.param("ddp", "raises", "rank 1 did not answer", "optimizer step 4", marks=pytest.mark.slow),
    pytest.param("fsdp", "dies", "rank 1 did not answer", "optimizer step 4", marks=pytest.mark.slow),
    ("fsdp", "exact", "the all-gather of the exact weights of ", "rank 1 did not answer"),
    pytest.param("hsdp", "dies", "rank 1 did not answer", "optimizer step 4", marks=pytest.mark.slow),
    pytest.param("ddp", "outer", "rank 1 did not answer", "optimizer step", marks=pytest.mark.slow),
    pytest.param("ddp", "far dies", "rank 1 did not answer", "optimizer step 4", marks=pytest.mark.slow),
    pytest.param("fsdp", "far dies", "rank 1 did not answer", "optimizer step 4", marks=pytest.mark.slow),
    pytest.param("hsdp", "far dies", "rank 1 did not answer", "optimizer step 4", marks=pytest.mark.slow),
    pytest.param("ddp", "pauses", "rank 1 did not answer", "reports a timeout: ", marks=pytest.mark.slow),
    pytest.param("fsdp", "pauses", "rank 1 did not answer", "reports a timeout: ", marks=pytest.mark.slow),
    pytest.param("hsdp", "pauses", "rank 1 did not answer", "reports a timeout: ", marks=pytest.mark.slow),
    ("ddp", "accumulates", "rank 1 differs from rank 0 in Trainer(accumulate_grad_batches=...): 3 instead of 1", ""),
    ("fsdp", "validates", "rank 1 differs from rank 0 in Trainer(enable_validation=...): True instead of False", ""),
]


@pytest.mark.parametrize(("kind", "how", "expected", "also"), CASES)
def test_the_error_names_the_rank(tmp_path: Path, kind: Kind, how: str, expected: str, also: str) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(_train, 2, tmp_path, kind, how, timeout=60, process_group=None)
    text = str(error.value)
    assert expected in text
    assert also in text


def _end_between_steps(rank: int, world_size: int, folder: Path, where: str) -> None:
    join_group(rank, world_size, folder, TIMEOUT_S)
    net = mlp()
    if rank == 1 and where == "the comparison of models and options":
        os.kill(os.getpid(), signal.SIGKILL)
    prepared = prepare(net, LoCo(), SyncOptions(), scatter=False)
    session = attach_ddp(DistributedDataParallel(net), prepared, device=CPU)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # the other rank has left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    session.load(str(folder / "some.ckpt"), None)


@pytest.mark.parametrize("where", ["the comparison of models and options", "naming a run"])
def test_the_error_names_a_rank_that_ends_between_steps(tmp_path: Path, where: str) -> None:
    with pytest.raises(AssertionError) as error:
        run_ranks(_end_between_steps, 2, tmp_path, where, timeout=60, process_group=None)
    text = str(error.value)
    assert f"rank 0 was in {where}" in text
    assert "rank 1 did not answer" in text
