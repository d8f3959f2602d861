"""Methods on parts of parameters: the laws that they keep on one level, on two levels, ranks in threads.

Real processes: `test_two_levels`, `test_hsdp`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.ranks.ranks import Ranks
from testing.invariants.harness import CONFIGURATIONS, SPECS, conserving_form, everything, fingerprint, gradient
from testing.worlds.simulated import SimulatedWorld
from testing.worlds.two_level import Kind, NodesWorld

KINDS: tuple[Kind, ...] = ("ddp", "fsdp", "hsdp")
# One of each kind: codecs with and without feedback, a common scale, sparse ones that choose alone, by rank, together
# and over the whole model, low rank, wrappers, and a method that changes in mid-run.
NAMES = (
    "dense",
    "loco",
    "LoCo, 1 bit after two steps",
    "qsgd",
    "terngrad",
    "sharedscale",
    "topk",
    "randomk",
    "dgc",
    "exdyna",
    "scalecom",
    "gtopk",
    "rank 1",
    "EF21 with momentum",
    "warm-up of three",
)
QUICK = ("loco", "topk", "exdyna", "rank 1")  # under FSDP2 and HSDP
STEPS = 4


def grads_of(world: NodesWorld, step: int) -> list[dict[str, torch.Tensor]]:
    return [
        {spec.name: gradient(spec.name, spec.shape, rank, step) for spec in world.specs} for rank in range(world.size)
    ]


def make(name: str, kind: Kind, nodes: int, per_node: int, *, conserving: bool = False, **options: Any) -> NodesWorld:
    compressor = everything(CONFIGURATIONS[name])
    compressor = conserving_form(compressor) if conserving else compressor
    return NodesWorld(kind, compressor, SPECS, nodes, per_node, seed=7, **options)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind == "ddp" or name in QUICK else [pytest.mark.slow])
        for name, kind in itertools.product(NAMES, KINDS)
    ],
)
def test_what_came_in_has_come_out_or_is_in_a_residual(name: str, kind: Kind) -> None:
    """On three nodes of two ranks; bytes inside and between are those that are announced, all ranks have the same."""
    came = {spec.name: torch.zeros(spec.numel) for spec in SPECS}
    out = {spec.name: torch.zeros(spec.numel) for spec in SPECS}
    with make(name, kind, 3, 2, conserving=True) as world:
        for step in range(STEPS):
            grads = grads_of(world, step)
            means = world.step(grads)
            for spec in SPECS:
                came[spec.name] += torch.stack([each[spec.name] for each in grads]).mean(0)
                out[spec.name] += world.whole(means)[spec.name]
            if kind == "ddp":
                assert len({fingerprint(each) for each in means}) == 1
            if kind == "hsdp":
                assert [fingerprint(each) for each in means[:2]] * 3 == [fingerprint(each) for each in means]
        unsent = world.unsent()
        for sync in world.syncs:
            assert sync.ranks.intra_node is not None
            if kind != "hsdp":
                plan = plan_of(sync)
                messages = [each for transfer in plan.gradients for each in transfer.messages]
                marks = sum(each.total_nbytes for each in messages if each.what == "marks")  # FSDP2's hooks send them
                assert sync.ranks.intra_node.sent_nbytes == STEPS * (plan.intra_node_nbytes - marks)
        state = world.syncs[0].state
        for spec in SPECS:
            if state.assignments[spec.name].method.conserves(state.specs[spec.name]):
                error = (out[spec.name] + unsent[spec.name] - came[spec.name]).norm()
                assert error <= 2e-5 * (1.0 + came[spec.name].norm()), spec.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["loco", "LoCo, 1 bit after two steps", "topk", "exdyna", "rank 1"])
def test_a_restored_engine_goes_on_as_if_never_stopped(name: str, kind: Kind) -> None:
    with make(name, kind, 2, 2) as world, make(name, kind, 2, 2) as again:
        for step in range(3):
            world.step(grads_of(world, step))
        saved = [capture(sync) for sync in world.syncs]
        for rank, sync in enumerate(again.syncs):
            restore(sync, saved[rank], load_rank=saved.__getitem__, on_world_size_change="reset")
        ended, resumed = world.step(grads_of(world, 3)), again.step(grads_of(world, 3))
        assert [fingerprint(each) for each in ended] == [fingerprint(each) for each in resumed]


def flat(world_size: int) -> list[GradientSync]:
    compressor = conserving_form(everything(CONFIGURATIONS["loco"]))
    comms = SimulatedWorld(world_size).comms
    return [GradientSync(compressor, SPECS, Ranks.flat(comm), torch.device("cpu"), sharded=False) for comm in comms]


@pytest.mark.parametrize("policy", ["fold", "reset"])
@pytest.mark.parametrize("kind", KINDS)
def test_residuals_follow_when_nodes_or_ranks_change(kind: Kind, policy: Any) -> None:
    """From three nodes of two ranks to two of three (as many ranks), to two of two, to one level and back."""
    name = "loco"
    with make(name, kind, 3, 2, conserving=True) as world:
        for step in range(STEPS):
            world.step(grads_of(world, step))
        unsent, saved = world.unsent(), [capture(sync) for sync in world.syncs]
    assert any(values.any() for values in unsent.values())
    for other in KINDS:
        for nodes, per_node in ((2, 3), (2, 2)):
            with make(name, other, nodes, per_node, conserving=True) as changed:
                _restored(changed.syncs, saved, policy)
                _same(changed.unsent(), unsent, policy)
    one_level = flat(2)
    _restored(one_level, saved, policy)
    means = {
        spec.name: torch.stack([sync.state.export_unsent(spec.name) for sync in one_level]).mean(0) for spec in SPECS
    }
    _same(means, unsent, policy)
    with make(name, kind, 2, 2, conserving=True) as again:
        _restored(again.syncs, [capture(sync) for sync in one_level], policy)
        _same(again.unsent(), unsent, policy)


def _restored(syncs: list[GradientSync], saved: list[dict[str, Any]], policy: Any) -> None:
    for rank, sync in enumerate(syncs):
        mine = saved[rank % len(saved)]
        restore(sync, mine, load_rank=saved.__getitem__, on_world_size_change=policy)


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], policy: str) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values if policy == "fold" else torch.zeros_like(values))


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_rank_is_rolled_back_on_all(kind: Kind) -> None:
    with make("loco", kind, 2, 2, skips_overflow=True) as world:
        world.step(grads_of(world, 0))
        before = [capture(sync) for sync in world.syncs]
        bad = grads_of(world, 1)
        bad[3]["matrix"][-1] = float("inf")
        means = world.step(bad)
        assert not world.whole(means)["matrix"].isfinite().all()
        for sync, saved in zip(world.syncs, before, strict=True):
            now = capture(sync)
            assert now["num_skipped"] == saved["num_skipped"] + 1
            assert now["step_index"] == saved["step_index"]
            for name, entry in saved["parameters"].items():
                for key, tensor in entry["tensors"].items():
                    assert torch.equal(tensor, now["parameters"][name]["tensors"][key])
