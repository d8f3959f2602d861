"""All groups are connected before the first step, where NCCL is concerned by a collective that the host waits for."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowbit_strategy.ranks.ranks import make_ranks
from lowbit_strategy.ranks.topology import Topology
from testing.worlds.echo import Operations

pytest.importorskip("triton", reason="triton is not installed")

from testing.cuda.host_code import CUDA, on_cuda


@pytest.mark.parametrize(
    ("size", "apart", "num_groups"), [(None, False, 1), (None, True, 2), (2, False, 3), (2, True, 4)]
)
def test_every_group_has_been_used_when_a_step_begins(size: int | None, apart: bool, num_groups: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with on_cuda(), Operations() as operations:
            groups = make_ranks(None, Topology(4, (2, 2), node_size=size), CUDA, own_world=apart)
        used = [name for name in operations.names if "allreduce" in name or "alltoall" in name or "_to_copy" in name]
        assert (
            used == ["c10d.allreduce_.default", "c10d.alltoall_base_.default", "aten._to_copy.default"] * num_groups
        )  # each waited for
        groups.destroy()
    finally:
        dist.destroy_process_group()
