"""Exchanges among ranks that are far apart: the results of collectives, whatever the sizes, and nothing left over."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import Comm, GroupComm
from lowbit_strategy.far_links.far_comm import FarComm
from lowbit_strategy.lost_ranks import LostRankError
from testing.processes.ranks import run_ranks


def _far(timeout_s: float = 60) -> FarComm:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier(group)
    assert group is not None
    return FarComm(group)


def _everything(comm: Comm, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One of each exchange, all under way at once, waited for in order."""
    rank, world_size = comm.rank, comm.world_size
    x = (torch.arange(world_size * numel) + 100 * rank).to(dtype).view(world_size, numel)
    to_all, gathered, again = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    # rank s sends (s + 2 r) % 5 elements to rank r
    sent = [(rank + 2 * r) % 5 for r in range(world_size)]
    came = [(s + 2 * rank) % 5 for s in range(world_size)]
    uneven = torch.zeros(sum(came), dtype=dtype)
    largest = torch.tensor([rank, -rank, 3, 5 + rank, 2, rank % 2], dtype=dtype)
    smallest = largest.clone()
    total = torch.arange(7).to(dtype) + rank  # whole numbers: sums are exact in any order
    pending = [
        comm.all_to_all(to_all, x),
        comm.all_gather(gathered, x[0]),
        comm.all_to_all(again, x + 1),
        comm.all_to_all_uneven(uneven, (torch.arange(sum(sent)) + 10 * rank).to(dtype), came, sent),
        comm.all_reduce_max(largest),
        comm.all_reduce(total),
        comm.all_reduce(smallest, dist.ReduceOp.MIN),
    ]
    for each in pending:
        each.wait()
    return [to_all, gathered, again, uneven, largest, total, smallest]


def _compared(rank: int, world_size: int) -> dict[str, Any]:
    far, near = _far(), GroupComm()
    same = []
    for step in range(6):
        for numel in (0, 1, 7, 64, 1000 if step < 3 else 999):
            for dtype in (torch.uint8, torch.float32):
                ours, theirs = _everything(far, numel, dtype), _everything(near, numel, dtype)
                same.append(all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)))
    far.release([far.group])
    return {"same": all(same), "counted": far.sent_nbytes == near.sent_nbytes}


def test_results_of_collectives() -> None:
    for world_size in (1, 3):
        assert run_ranks(_compared, world_size) == [{"same": True, "counted": True}] * world_size


def _late(rank: int, world_size: int) -> list[int]:
    comm = _far(timeout_s=30)
    out = torch.zeros(world_size, 4, dtype=torch.uint8)
    for step in range(3):
        if rank == 1 and step == 1:
            time.sleep(3)
        comm.all_gather(out, torch.full((4,), rank + 10 * step, dtype=torch.uint8)).wait()
    return out[:, 0].tolist()


def test_a_rank_that_is_late_is_waited_for() -> None:
    assert run_ranks(_late, 3) == [[20, 21, 22]] * 3


def _done_first(rank: int, world_size: int) -> list[int]:
    """Rank 0 looks at its last messages when the others have left."""
    comm = _far()
    out = torch.zeros(world_size, 4, dtype=torch.uint8)
    under_way = comm.all_gather(out, torch.full((4,), rank, dtype=torch.uint8))
    if rank == 0:
        time.sleep(1.5)
    under_way.wait()
    return out[:, 0].tolist()


def test_those_who_are_done_first_may_leave() -> None:
    assert run_ranks(_done_first, 3) == [[0, 1, 2]] * 3


def _many(rank: int, world_size: int) -> dict[str, Any]:
    comm = _far()
    held, threads = [], []
    for step in range(1000):
        size = 512 if step < 500 else 1024  # a controller has switched
        x = torch.full((world_size, size + step % 2), rank, dtype=torch.uint8)
        comm.all_to_all(torch.empty_like(x), x).wait()
        comm.all_gather(torch.empty_like(x), x[0]).wait()
        held.append(comm.ahead_nbytes)
        threads.append(threading.active_count())
    row = world_size - 1
    return {
        "at 100": held[100] == row * 2 * (512 + 513),
        "at the end": held[-2] == row * 2 * (1024 + 1025),  # in the last step others may have left already
        "most": max(held) <= row * 2 * (512 + 513 + 1024 + 1025),
        "threads": set(threads[10:]) == {threads[10]},
    }


@pytest.mark.slow
def test_nothing_is_left_over_in_a_thousand_steps() -> None:
    """Receives that are posted for sizes that no longer come are given up, on all ranks at the same exchange."""
    for rank in run_ranks(_many, 3, timeout=120):
        assert all(rank.values()), rank


def _twins(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    """Sums of several twins, of which the first stays in use; and what the others hold when they have ended."""
    comm = _far(timeout_s=15)
    sums, held = [], []
    first = comm.with_own_counter()
    for numel in (100, 50, 100):
        twin = comm.with_own_counter()
        for each in (first, twin, comm, twin.with_own_counter()):
            x = torch.full((numel,), rank + 1.0)
            each.all_reduce(x).wait()
            sums.append(float(x.sum()) / numel)
        twin.end()
        held.append(twin.ahead_nbytes)
    return sums, held


def test_twins_do_not_take_each_others_messages() -> None:
    """One after the other and beside each other: an earlier one's receives may still be posted."""
    for sums, held in run_ranks(_twins, 3, timeout=60):
        assert sums == [6.0] * 12
        assert held == [0] * 3


def _dies(rank: int, world_size: int, folder: Path) -> None:
    comm = _far(timeout_s=15)
    comm.describe_step = lambda: "optimizer step 7"
    out = torch.zeros(world_size, 4096, dtype=torch.uint8)
    for _ in range(3):
        comm.all_gather(out, out[0]).wait()
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    before = threading.active_count()
    with pytest.raises(LostRankError) as raised:
        comm.all_gather(out, out[0]).wait()
    dist.destroy_process_group(comm.group)
    comm.release([comm.group])
    (folder / str(rank)).write_text(f"{raised.value} threads: {threading.active_count() - before}")


def test_a_rank_that_dies_while_receives_are_posted_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 2 died of SIGKILL"):
        run_ranks(_dies, 3, tmp_path)
    for rank in (0, 1):
        error = (tmp_path / str(rank)).read_text()
        assert "rank 2 did not answer" in error
        assert f"rank {rank} was in the all-gather of 12,288 bytes, exchange 4 of optimizer step 7" in error
        assert error.endswith("threads: 0")
