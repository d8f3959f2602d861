"""The collectives of a process group whatever it calls its backend."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.far_links.far_comm import _NUM_SIZES, FarComm, _size_index
from testing.processes.ranks import run_ranks

BACKENDS = (None, "gloo", "cpu:gloo")


class Gathered(NamedTuple):
    backend: str
    rows: list[list[int]]
    nbytes: int


def _gather(rank: int, world_size: int, folder: Path, backend: str | None) -> Gathered:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    comm = GroupComm()
    rows = torch.empty(world_size, 5, dtype=torch.uint8)
    comm.all_gather(rows, torch.full((5,), rank + 1, dtype=torch.uint8)).wait()
    return Gathered(dist.get_backend(), rows.tolist(), comm.sent_nbytes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_gather_by_the_backend_of_the_tensors_device(backend: str | None, tmp_path: Path) -> None:
    """A group made without a backend, or with one per device, calls itself something else than ``gloo``."""
    assert os.environ.get("WORLD_SIZE") is None
    results = run_ranks(_gather, 2, tmp_path, backend, process_group=None)
    for rank in results:
        assert rank.rows == [[1] * 5, [2] * 5]
        assert rank.nbytes == 5
    if backend is None:
        assert results[0].backend != "gloo"


def test_no_collective_that_torch_deprecates() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            GroupComm().all_gather(torch.empty(2, 5), torch.empty(5)).wait()
    finally:
        dist.destroy_process_group()


def _exchanges_in_any_order(rank: int, world_size: int) -> list[float]:
    """Sizes in the order in which a rank comes across them, another one on each rank, in two rounds."""
    comm, sizes = FarComm(dist.new_group()), (4, 2401, 3, 70_001)
    found = []
    for _ in range(2):
        under_way = {}
        for size in sizes if rank else sizes[::-1]:
            rows, came = torch.full((world_size, size), rank + size / 2), torch.empty(world_size, size)
            total = torch.full((size,), rank + 1.0)
            under_way[size] = (comm.all_to_all(came, rows), came, comm.all_reduce(total), total)
        for size in sizes:
            sent, came, added, total = under_way[size]
            sent.wait()
            added.wait()
            found += [float((came[r] - r - size / 2).abs().max()) for r in range(world_size)] + [float(total.max()) - 3]
    comm.end()
    return found


def test_far_messages_are_told_apart_in_any_order() -> None:
    for rank in run_ranks(_exchanges_in_any_order, 2):
        assert rank == [0.0] * len(rank)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_far_sizes_share_a_tag_where_they_share_memory(one: int, other: int) -> None:
    (first, first_nbytes), (second, second_nbytes) = _size_index(one), _size_index(other)
    assert (first == second) == (first_nbytes == second_nbytes)
    assert one <= first_nbytes <= one + one // 2048
    assert 0 <= first < _NUM_SIZES
