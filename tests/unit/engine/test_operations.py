"""What a step costs the host: operations per bucket, whatever the number of ranks and tensors."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec, dim0_row_numel
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels import native
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.echo import EchoComm, Operations

pytestmark = pytest.mark.skipif(not native.available(), reason="counts the calls of the C kernels")

MATRICES = [TensorSpec(f"layer.{i}.weight", (256, 192)) for i in range(6)]
VECTORS = [TensorSpec(f"layer.{i}.bias", (256,)) for i in range(8)]


def operations_of_a_reduce(
    specs: list[TensorSpec],
    world_size: int,
    compressor: Compressor = LoCo(),  # noqa: B008 (frozen)
    *,
    sharded: bool,
    rollback: bool = False,
) -> list[str]:
    """Of the second step: the first makes tables and buffers."""
    comm = EchoComm(world_size)
    sync = GradientSync(
        compressor, specs, Ranks.flat(comm), torch.device("cpu"), sharded=sharded, skips_overflow=rollback
    )
    entries, at = [], 0
    for spec in specs:
        entries.append((spec.name, at))
        at += dim0_row_numel(spec.shape, world_size) if sharded else spec.numel
    layout = BucketLayout(tuple(entries), at if sharded else None)
    x = torch.randn(at * world_size if sharded else at, generator=torch.Generator().manual_seed(0))
    out = torch.empty(at) if sharded else x
    for step in range(2):
        with Operations() as operations:
            sync.begin_step()
            wait_for_all(sync.reduce(layout, x, out))
        assert out.isfinite().all(), step
        sync.end_step()
    return operations.names


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_a_bucket_takes_few_operations(sharded: bool) -> None:
    names = operations_of_a_reduce(MATRICES + VECTORS, 64, sharded=sharded)
    assert len(names) <= 40, names
    assert not [name for name in names if "zero" in name]  # messages are written whole


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_neither_ranks_nor_tensors_add_operations(sharded: bool) -> None:
    few = operations_of_a_reduce(MATRICES[:1] + VECTORS[:1], 2, sharded=sharded)
    assert len(operations_of_a_reduce(MATRICES + VECTORS, 16, sharded=sharded)) == len(few)


def test_overflows_are_noted_only_where_a_rollback_reads_the_note() -> None:
    """Of methods that exchange by themselves: each note is a pass over the result."""
    sync = {
        rollback: operations_of_a_reduce(MATRICES[:2], 1, PowerSGD(rank=2), sharded=False, rollback=rollback)
        for rollback in (False, True)
    }
    assert "aten.maximum.out" not in sync[False]
    assert sync[True].count("aten.maximum.out") == 2
