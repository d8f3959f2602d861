"""Another number of ranks on resume: under ``fold`` nothing that has not been sent is lost, whatever serves then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lowbit_strategy import QSGD, Dense, ErrorFeedback, LoCo, PowerSGD, TopK
from lowbit_strategy.checkpoint.capture import Saved, capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.simulated import SimulatedWorld

SPECS = [TensorSpec("first", (24, 40)), TensorSpec("second", (50, 30))]
LAYOUT = BucketLayout((("first", 0), ("second", 960)))
BOTH_HOPS = LoCo(bits=2, block_size=64, beta=0.5, return_beta=0.5, residual="float32", exempt=())
COMPRESSORS: dict[str, Compressor] = {
    "loco": BOTH_HOPS,
    "feedback": ErrorFeedback(compressor=QSGD(bits=3, exempt=())),
    "topk": TopK(density=0.05, exempt=()),
    "powersgd": PowerSGD(rank=2, exempt=()),
    "qsgd, no residual": QSGD(bits=4, exempt=()),
    "dense": Dense(),
}


def ranks(compressor: Compressor, world: SimulatedWorld) -> list[GradientSync]:
    return [
        GradientSync(compressor, SPECS, Ranks.flat(comm), torch.device("cpu"), sharded=False) for comm in world.comms
    ]


def train(world: SimulatedWorld, syncs: Sequence[GradientSync], steps: int) -> dict[str, Tensor]:
    """What the results lack of the true means, over all steps: it must be in the residuals."""
    lack = torch.zeros(sum(spec.numel for spec in SPECS))
    for step in range(steps):
        buffers = []
        for rank in range(len(syncs)):
            generator = torch.Generator().manual_seed(10 * step + rank)
            buffers.append(torch.randn(lack.numel(), generator=generator))
        lack += torch.stack(buffers).mean(0)
        world.reduce(syncs, LAYOUT, buffers, buffers)
        lack -= buffers[0]
    return {name: lack[at:][: spec.numel] for (name, at), spec in zip(LAYOUT.entries, SPECS, strict=True)}


def missing(syncs: Sequence[GradientSync]) -> dict[str, Tensor]:
    """The mean over ranks of what each has not sent."""
    found = {}
    for spec in SPECS:
        parts = [sync.state.export_unsent(spec.name) for sync in syncs]
        found[spec.name] = torch.stack([torch.zeros(spec.numel) if part is None else part for part in parts]).mean(0)
    return found


def resumed(saved: Sequence[Saved], compressor: Compressor, world_size: int) -> list[GradientSync]:
    syncs = ranks(compressor, SimulatedWorld(world_size))
    for rank, sync in enumerate(syncs):
        restore(sync, saved[rank % len(saved)], load_rank=lambda r: saved[r], on_world_size_change="fold")
    return syncs


@pytest.mark.parametrize("following", COMPRESSORS)
@pytest.mark.parametrize("earlier", ["loco", "feedback", "topk", "powersgd"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_fold_keeps_everything_under_any_compressor(earlier: str, following: str, world_size: int) -> None:
    world = SimulatedWorld(3)
    syncs = ranks(COMPRESSORS[earlier], world)
    before = train(world, syncs, 3)
    after = missing(resumed([capture(sync) for sync in syncs], COMPRESSORS[following], world_size))
    for name, values in before.items():
        assert values.any()
        torch.testing.assert_close(after[name], values, rtol=1e-5, atol=1e-5)


def test_fold_keeps_what_a_replaced_method_left_over() -> None:
    world = SimulatedWorld(3)
    syncs = ranks(BOTH_HOPS, world)
    before = train(world, syncs, 2)
    for sync in syncs:
        sync.use(Dense())  # keeps no residual, so the next gradient takes it along
    after = missing(resumed([capture(sync) for sync in syncs], Dense(), 2))
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-5, atol=1e-5)


def test_a_state_of_the_published_grid_goes_on_with_other_codes_of_the_same_width() -> None:
    """What ``loco`` was before and is now: every rank's residual is taken over as it is."""
    published, world = LoCo(codebook="uniform", block_size=64, exempt=()), SimulatedWorld(2)
    assert LoCo(block_size=64, exempt=()).fmt.is_e2m1
    syncs = ranks(published, world)
    train(world, syncs, 3)
    saved = [capture(sync) for sync in syncs]
    again = resumed(saved, LoCo(block_size=64, exempt=()), 2)
    for before, after in zip(syncs, again, strict=True):
        for spec in SPECS:
            kept, taken = before.state.residual(spec.name), after.state.residual(spec.name)
            assert kept is not None
            assert taken is not None
            assert kept.any()
            torch.testing.assert_close(taken, kept, rtol=0.02, atol=1e-3)
