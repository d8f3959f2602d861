"""Members change between two steps: the engine goes on with the new ranks, and nothing that was not sent is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lowbit_strategy import QSGD, Dense, LoCo, PowerSGD, TopK
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.simulated import SimulatedWorld

SPECS = [TensorSpec("first", (24, 40)), TensorSpec("second", (50, 30))]
LAYOUT = BucketLayout((("first", 0), ("second", 960)))
NUMEL = 960 + 1500
COMPRESSORS: dict[str, Compressor] = {
    "loco": LoCo(bits=2, block_size=64, beta=0.5, return_beta=0.5, residual="float32", exempt=()),
    "topk": TopK(density=0.05, exempt=()),
    "powersgd": PowerSGD(rank=2, exempt=()),
    "qsgd": QSGD(bits=4, exempt=()),
    "dense": Dense(),
}


def engines(compressor: Compressor, world: SimulatedWorld) -> list[GradientSync]:
    return [
        GradientSync(compressor, SPECS, Ranks.flat(comm), torch.device("cpu"), sharded=False) for comm in world.comms
    ]


def step(world: SimulatedWorld, syncs: Sequence[GradientSync], index: int) -> tuple[Tensor, Tensor]:
    """The true mean, and the result."""
    grads = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * index + r)) for r in range(len(syncs))]
    mean = torch.stack(grads).mean(0)
    world.reduce(syncs, LAYOUT, grads, grads)
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    return mean, grads[0]


def unsent(syncs: Sequence[GradientSync]) -> Tensor:
    """The mean over ranks of what each has not sent."""
    rows = []
    for sync in syncs:
        parts = [sync.state.export_unsent(spec.name) for spec in SPECS]
        rows.append(torch.cat([torch.zeros(s.numel) if p is None else p for s, p in zip(SPECS, parts, strict=True)]))
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_groups_made_anew_change_nothing(name: str) -> None:
    first, again, never = SimulatedWorld(4), SimulatedWorld(4), SimulatedWorld(4)
    syncs, others = engines(COMPRESSORS[name], first), engines(COMPRESSORS[name], never)
    for index in range(3):
        step(first, syncs, index)
        step(never, others, index)
    for sync, comm in zip(syncs, again.comms, strict=True):
        sync.renew(Ranks.flat(comm))
    for index in range(3, 6):
        assert torch.equal(step(again, syncs, index)[1], step(never, others, index)[1])
    for sync, other in zip(syncs, others, strict=True):
        assert all(map(torch.equal, sync.state.all_tensors(), other.state.all_tensors()))


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_leaves_takes_only_its_own_residual_along(name: str, size: int) -> None:
    world, fewer = SimulatedWorld(4), SimulatedWorld(size)
    syncs = engines(COMPRESSORS[name], world)
    for index in range(3):
        step(world, syncs, index)
    left = syncs[:size]
    before = unsent(left)
    assert before.any() or name in ("qsgd", "dense")
    for sync, comm in zip(left, fewer.comms, strict=True):
        sync.renew(Ranks.flat(comm))
        assert (sync.ranks.world_size, sync.step_index) == (size, 3)
    torch.testing.assert_close(unsent(left), before, rtol=1e-5, atol=1e-5)
    lack = torch.zeros(NUMEL)
    for index in range(3, 6):
        mean, result = step(fewer, left, index)
        lack += mean - result
    if name != "qsgd":  # has no residual
        torch.testing.assert_close(unsent(left), before + lack, rtol=1e-4, atol=1e-4)
