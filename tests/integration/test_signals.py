"""SIGTERM and SLURM's requeue signal at random moments, to one rank or all: a run ends or goes on, and never hangs."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

import lowbit_strategy
from lowbit_strategy import DiLoCo, LoCo
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from testing.processes.ranks import run_ranks
from testing.training import accelerated
from testing.training.comparing import fingerprint
from testing.training.regression import ByStep, Kind, loader, strategy, trainer

LIMIT_S = 30.0
STEPS = 60


class Slow(ByStep):
    """Long enough for a signal to come at any moment of a step."""

    def __init__(self, seed: int, signum: int | None, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.seed, self.signum, self.ranks = seed, signum, ranks
        self.sent_at = float("inf")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2 and self.signum is not None and self.global_rank in self.ranks:
            pause = random.Random(self.seed).uniform(0.0, 0.15) + random.Random().uniform(0.0, 0.02)
            threading.Timer(pause, self._signal).start()

    def _signal(self) -> None:
        self.sent_at = time.perf_counter()
        assert self.signum is not None
        os.kill(os.getpid(), self.signum)


class Late(DummyLogger):
    """Rank 1 looks where to save when rank 0 has written: the Trainer's handler ends the loggers first."""

    def finalize(self, status: str) -> None:
        time.sleep(0.2 * dist.get_rank())


def _environment(folder: Path, rank: int, world_size: int) -> dict[str, str]:
    """What SLURM sets, and a command in the place of its own that writes down how it was called."""
    command = folder / "scontrol"
    if rank == 0:
        command.write_text(f"#!/bin/sh\necho $@ >> {folder}/requeued\n")
        command.chmod(0o755)
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": str(world_size),
        "SLURM_NTASKS_PER_NODE": str(world_size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NAME": "test",
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }


class Terminated(NamedTuple):
    """How a run ended, how long that took, and the weights to which its last checkpoint goes on."""

    ended: str
    seconds: float
    bits: int


class Requeued(NamedTuple):
    same: bool  # the job that follows ends with the same weights
    saved: list[str]
    resumed: bool  # and goes on from there


def _terminated(
    rank: int, world_size: int, folder: Path, kind: Kind, ranks: tuple[int, ...], number: int, local: bool = False
) -> list[Terminated]:
    options = {"outer": DiLoCo(every=4)} if local else {}
    found = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what comes when the run has ended for the other rank's signal
    for seed in range(number):
        own = folder / str(seed)
        saver = ModelCheckpoint(own, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        model, ended = Slow(seed, signal.SIGTERM, ranks), "returned"
        made = trainer(strategy(kind, **options), max_steps=10_000, callbacks=[saver], enable_checkpointing=True)
        try:
            made.fit(model, loader())
        except SystemExit as error:
            ended = type(error).__name__
        took = time.perf_counter() - model.sent_at
        step = (made.global_step // 3) * 3
        again = ByStep()
        dist.barrier()
        trainer(strategy(kind, **options), max_steps=step + 1).fit(again, loader(), ckpt_path=own / f"step={step}.ckpt")
        found.append(Terminated(ended, took, fingerprint(again)))
    return found


def _requeued(
    rank: int, world_size: int, folder: Path, kind: Kind, ranks: tuple[int, ...], number: int, local: bool = False
) -> list[Requeued]:
    os.environ.update(_environment(folder, rank, world_size))
    dist.barrier()
    options = {"outer": DiLoCo(every=4)} if local else {}
    found = []
    for seed in range(number):
        prints = []
        for signum in (signal.SIGUSR2, None):
            environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)
            model = Slow(seed, signum, ranks)
            made = trainer(
                strategy(kind, **options),
                max_steps=STEPS,
                plugins=[environment],
                logger=Late(),
                num_nodes=1,
                default_root_dir=folder / str(seed),
            )
            made.fit(model, loader())
            took = time.perf_counter() - model.sent_at  # SLURM ends what has been requeued; here it trains on
            assert took < LIMIT_S
            prints.append(fingerprint(model))
            dist.barrier()
        saved = sorted(each.name for each in (folder / str(seed)).glob("hpc_ckpt_*.ckpt"))
        found.append(Requeued(prints[0] == prints[1], saved, len(model.losses) < STEPS))
    return found


CASES: list[tuple[Kind, tuple[int, ...]]] = [("ddp", (1,)), ("ddp", (0, 1)), ("fsdp", (0,)), ("hsdp", (0, 1))]


def _cases(quick: tuple[Kind, tuple[int, ...]] | None) -> list[Any]:
    """A quick one, if there is any, and all with more signals."""
    return [*([(*quick, 2)] if quick else []), *(pytest.param(*case, 13, marks=pytest.mark.slow) for case in CASES)]


@pytest.mark.parametrize(("kind", "ranks", "number"), _cases(("fsdp", (0,))))
def test_sigterm_ends_the_run_on_all_ranks(tmp_path: Path, kind: Kind, ranks: tuple[int, ...], number: int) -> None:
    found = run_ranks(_terminated, 2, tmp_path, kind, ranks, number, timeout=LIMIT_S * 2 + 16 * number)
    for first, second in zip(*found, strict=True):
        assert first.ended == second.ended == "SIGTERMException"
        assert max(first.seconds, second.seconds) < LIMIT_S
        assert first.bits == second.bits


@pytest.mark.parametrize(("kind", "ranks", "number"), _cases(("ddp", (0, 1))))
def test_slurm_requeues_with_a_whole_checkpoint(
    tmp_path: Path, kind: Kind, ranks: tuple[int, ...], number: int
) -> None:
    found = run_ranks(_requeued, 2, tmp_path, kind, ranks, number, timeout=LIMIT_S * 2 + 16 * number)
    for facts in found:
        assert facts == [Requeued(same=True, saved=["hpc_ckpt_1.ckpt"], resumed=True)] * number
    assert len((tmp_path / "requeued").read_text().splitlines()) == number


def _accelerated(rank: int, world_size: int, folder: Path, kind: Any, seed: int | None, ranks: tuple[int, ...]) -> int:
    """Eighteen steps, from the last checkpoint that is whole: the model's bits. SIGTERM ends a process at once."""
    plugin = LowBitPlugin(LoCo(block_size=32), outer=DiLoCo(every=4) if kind == "local" else None)
    job = accelerated.prepared(accelerated.make("fsdp" if kind == "fsdp" else "ddp", plugin))
    step = max((int(path.parent.name) for path in folder.glob("*/complete")), default=0)
    if step:
        job.accelerator.load_state(str(folder / str(step)))
    while step < 18:
        if step == 4 and seed is not None and rank in ranks:
            pause = random.Random(seed).uniform(0.0, 0.2)
            threading.Timer(pause, os.kill, (os.getpid(), signal.SIGTERM)).start()
        accelerated.train(job, step + 1, skip=step)
        step += 1
        if step % 3 == 0:
            job.accelerator.save_state(str(folder / str(step)))
            job.accelerator.wait_for_everyone()
            (folder / str(step) / "complete").touch()
    if seed is not None:
        time.sleep(LIMIT_S)  # the signal is still to come
    binding_of(job.accelerator).finish()
    return fingerprint(job.model)


def _is_the_frameworks(text: str, lost: int) -> bool:
    """Whether the other rank's error came out of an exchange of Accelerate's own save, which knows no rank's name."""
    error = text.split(f"--- rank {1 - lost} raised ---")[1].split("\n--- ")[0]
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', error)
    package = os.path.dirname(lowbit_strategy.__file__)
    ours = [at for at, (path, _) in enumerate(frames) if path.startswith(package)]
    inside = frames[ours[-1] + 1 if ours else 0 :]  # an exchange that this package makes names its ranks
    return any("/torch/distributed/checkpoint/" in path for path, _ in inside) or any(
        "/accelerate/" in path and name in ("save_state", "wait_for_everyone") for path, name in inside
    )


def test_only_an_exchange_of_the_frameworks_own_may_be_silent() -> None:
    package = os.path.dirname(lowbit_strategy.__file__)
    save, ours = ("/lib/accelerate/accelerator.py", "save_state"), (f"{package}/checkpoint/agreement.py", "gather")
    exchange = ("/lib/torch/distributed/distributed_c10d.py", "broadcast")

    def accepted(*frames: tuple[str, str]) -> bool:
        lines = "".join(f'  File "{path}", line 1, in {name}\n' for path, name in frames)
        return _is_the_frameworks(f"--- rank 0 raised ---\n{lines}\n--- rank 1 died of SIGTERM ---", 1)

    assert accepted(save, exchange)
    assert accepted(save, ours, ("/lib/torch/distributed/checkpoint/utils.py", "all_reduce"), exchange)
    assert not accepted(save, ours, exchange)
    assert not accepted(("/lib/accelerate/accelerator.py", "backward"), exchange)


ACCELERATED = [("ddp", (1,)), ("ddp", (0, 1)), ("fsdp", (0,)), ("local", (1,))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "number"),
    [("fsdp", (1,), 1), *((*case, 13) for case in ACCELERATED)],
)
def test_accelerate_goes_on_from_a_whole_checkpoint(
    tmp_path: Path, kind: str, ranks: tuple[int, ...], number: int
) -> None:
    """Accelerate has no handler: the process ends, and the other ranks with it."""
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = run_ranks(_accelerated, 2, whole, kind, None, (), timeout=2 * LIMIT_S)
    for seed in range(number):
        own = tmp_path / str(seed)
        own.mkdir()
        with pytest.raises(AssertionError, match="died of SIGTERM") as error:
            run_ranks(_accelerated, 2, own, kind, seed, ranks, timeout=LIMIT_S)
        text = str(error.value)
        assert "2 of 2 ranks failed" in text, text
        assert len(ranks) == 2 or f"rank {ranks[0]} did not answer" in text or _is_the_frameworks(text, ranks[0]), text
        assert run_ranks(_accelerated, 2, own, kind, None, (), timeout=2 * LIMIT_S) == expected


@pytest.mark.slow
def test_local_steps_are_requeued_too(tmp_path: Path) -> None:
    """Ranks that train at speeds of their own answer together after their next turn."""
    found = run_ranks(_requeued, 2, tmp_path, "ddp", (1,), 2, True, timeout=LIMIT_S * 3)
    assert all(same and saved == ["hpc_ckpt_1.ckpt"] for facts in found for same, saved, _ in facts)
