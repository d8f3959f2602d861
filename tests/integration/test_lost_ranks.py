"""What ranks are told when one has no memory for an exchange, or begins to wait later than the others."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lowbit_strategy.lost_ranks import LostRankError, naming_lost_ranks
from testing.processes.ranks import run_ranks


def _without_memory(rank: int, world_size: int) -> str:
    try:
        with naming_lost_ranks(None, "the all-to-all", "optimizer step 3"):
            if rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            dist.all_reduce(torch.ones(1))
    except torch.OutOfMemoryError as error:
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        store.wait(["lowbit_strategy/lost/0"])  # the process ends no sooner than the other rank has asked
        return str(error)
    except LostRankError as error:
        return str(error)
    return "none"


def test_a_rank_without_memory_is_named() -> None:
    waiting, without = run_ranks(_without_memory, 2)
    assert without == "CUDA out of memory"
    assert "rank 1 was in the all-to-all of optimizer step 3, where it ran out of memory" in waiting
    assert "rank 1 had no memory left (OutOfMemoryError)" in waiting


def _wait_one_after_the_other(rank: int, world_size: int, reported: str) -> str:
    time.sleep(4 * rank)
    with pytest.raises(LostRankError) as error, naming_lost_ranks(None, "the all-to-all", "optimizer step 3"):
        raise RuntimeError(reported)
    dist.barrier()  # the store lives as long
    return str(error.value)


@pytest.mark.parametrize(
    "reported", ["Timed out waiting 5000ms for recv operation to complete", "Application timeout caused pair closure"]
)
def test_a_rank_that_times_out_later_is_not_accused(reported: str) -> None:
    for text in run_ranks(_wait_one_after_the_other, 2, reported):
        assert "all ranks answered" in text
        assert text.endswith(f"The transport reports a timeout: {reported}")
