"""`intra=8`: inside a node gradients travel as codes of 8 bits, ranks in threads. In processes: `test_two_levels`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit_strategy import LoCo
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.collectives.exchange import marks_nbytes
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.node_codes.coding import BlockCoding
from lowbit_strategy.plan.running import plan_of
from testing.invariants.harness import CONFIGURATIONS, conserving_form, everything, fingerprint, gradient
from testing.worlds.two_level import Grads, Kind, NodesWorld

KINDS: tuple[Kind, ...] = ("ddp", "fsdp", "hsdp")
SPECS = (
    TensorSpec("bias", (37,)),
    TensorSpec("one", (1,)),
    TensorSpec("empty", (0,)),
    TensorSpec("matrix", (24, 70)),
    TensorSpec("few_rows", (2, 45)),
    TensorSpec("embedding", (40, 30), "embedding"),
)
EXACT = ("bias", "one", "empty", "few_rows")  # LoCo's exempt parameters
STEPS = 3


def grads_of(world: NodesWorld, step: int) -> list[dict[str, torch.Tensor]]:
    return [
        {spec.name: gradient(spec.name, spec.shape, rank, step) for spec in world.specs} for rank in range(world.size)
    ]


def largest_error(grads: list[Grads], name: str) -> float:
    """Of the mean inside any node: that of one rank's codes is no larger."""
    return max(float(each[name].abs().max()) for each in grads) / 250 if grads[0][name].numel() else 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["loco", "topk", "rank 1"])
def test_means_lack_the_error_of_the_codes_and_what_is_in_residuals(name: str, kind: Kind) -> None:
    """On two nodes of three ranks: all ranks agree, bytes are those planned, all runs have the same bits."""
    compressor = conserving_form(everything(CONFIGURATIONS[name]))
    with NodesWorld(kind, compressor, SPECS, 2, 3, coding=BlockCoding(8)) as world:
        out = {spec.name: torch.zeros(spec.numel) for spec in SPECS}
        came, bound = dict(out), dict.fromkeys(out, 0.0)
        for step in range(STEPS):
            grads = grads_of(world, step)
            means = world.step(grads)
            for spec in SPECS:
                came[spec.name] = came[spec.name] + torch.stack([each[spec.name] for each in grads]).mean(0)
                out[spec.name] += world.whole(means)[spec.name]
                bound[spec.name] += largest_error(grads, spec.name)
            if kind == "ddp":
                assert len({fingerprint(each) for each in means}) == 1
            if kind == "hsdp":
                assert [fingerprint(each) for each in means[:3]] * 2 == [fingerprint(each) for each in means]
        unsent = world.unsent()
        for spec in SPECS:
            error = out[spec.name] + unsent[spec.name] - came[spec.name]
            assert float(error.abs().max() if spec.numel else 0.0) <= bound[spec.name] + 1e-4, spec.name
        if kind != "hsdp":  # planned for what attaching makes
            marks = 2 * marks_nbytes(len(SPECS)) if kind == "fsdp" else 0  # of unused parameters: by FSDP2's hook
            for sync in world.syncs:
                assert sync.ranks.intra_node is not None
                assert sync.ranks.intra_node.sent_nbytes == STEPS * (plan_of(sync).intra_node_nbytes - marks)
    with NodesWorld(kind, compressor, SPECS, 2, 3, coding=BlockCoding(8)) as again:
        ended = [again.step(grads_of(again, step)) for step in range(STEPS)][-1]
        assert [fingerprint(each) for each in ended] == [fingerprint(each) for each in means]


@pytest.mark.parametrize("kind", KINDS)
def test_exempt_parameters_and_what_is_sent_uncompressed_stay_exact(kind: Kind) -> None:
    """Also while a warm-up lasts, which is followed by codes."""
    first: dict[int | None, list[Grads]] = {}
    second: dict[int | None, list[Grads]] = {}
    for intra in (None, 8):
        with NodesWorld(
            kind, CONFIGURATIONS["warm-up of three"], SPECS, 2, 2, coding=None if intra is None else BlockCoding(intra)
        ) as world:
            *_, first[intra], second[intra] = [world.step(grads_of(world, step)) for step in range(4)]
    for name in EXACT:
        for exact, coded in zip(second[None], second[8], strict=True):
            assert torch.equal(exact[name], coded[name])
    assert [fingerprint(each) for each in first[8]] == [fingerprint(each) for each in first[None]]
    assert [fingerprint(each) for each in second[8]] != [fingerprint(each) for each in second[None]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_engine_goes_on_as_if_never_stopped_and_overflows_are_rolled_back(kind: Kind) -> None:
    options: dict[str, Any] = {"coding": BlockCoding(8), "skips_overflow": True}
    with (
        NodesWorld(kind, LoCo(block_size=32), SPECS, 2, 2, **options) as world,
        NodesWorld(kind, LoCo(block_size=32), SPECS, 2, 2, **options) as again,
    ):
        world.step(grads_of(world, 0))
        saved = [capture(sync) for sync in world.syncs]
        for name in ("matrix", "bias"):
            bad = grads_of(world, 1)
            bad[3][name][-1] = float("inf")
            assert not world.whole(world.step(bad))[name].isfinite().all()
        for rank, sync in enumerate(again.syncs):
            restore(sync, saved[rank], load_rank=saved.__getitem__, on_world_size_change="reset")
        ended, resumed = world.step(grads_of(world, 2)), again.step(grads_of(world, 2))
        assert [fingerprint(each) for each in ended] == [fingerprint(each) for each in resumed]
        assert {sync.num_skipped for sync in world.syncs} == {2}
