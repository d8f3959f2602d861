"""What a plan says a rank keeps is what engines keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit_strategy import DGC, DiLoCo, Exact, LoCo, WeightCode, WeightDelta
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.local_steps.published import OUTER_RULES
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.ranks.topology import Topology
from testing.invariants.harness import CONFIGURATIONS, SPECS, everything
from testing.large_model import plan_of_llama
from testing.worlds.single import engine, gradients, reduce_step
from testing.worlds.threaded import ThreadedWorld


@pytest.mark.parametrize(
    ("wrapper", "size", "coding", "outer"),
    [
        ("ddp", 8, None, None),
        ("ddp", None, None, DiLoCo(fragments=4)),
        ("fsdp", 8, WeightCode(), None),
        ("hsdp", 8, Exact(), None),
        ("hsdp", 8, WeightDelta(), DiLoCo()),
    ],
)
def test_seventy_billion_parameters_on_a_thousand_ranks(
    wrapper: Wrapper, size: int | None, coding: WeightCoding | None, outer: OuterRule | None
) -> None:
    plan = plan_of_llama(wrapper, size, coding, outer)
    memory, share = memory_of(plan), 1 if size is None else 1 / size
    numel = share * sum(spec.whole.numel for spec in plan.specs.values())
    assert memory.residuals == pytest.approx(numel * (1 + 2 / 128), rel=0.15)
    assert (memory.rounds > 0) == (outer is not None)
    if outer is not None:  # anchor, momentum, one fragment's pseudo-gradient
        assert memory.rounds == pytest.approx(numel * (8 + 4 / outer.fragments), rel=0.1)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_memory_of_residuals_is_what_engines_keep(name: str) -> None:
    for sharded in (False, True):
        sync = engine(everything(CONFIGURATIONS[name]), SPECS, sharded=sharded)
        assert memory_of(plan_of(sync)).residuals == sync.state.nbytes


@pytest.mark.parametrize("rule", [*OUTER_RULES.values(), DiLoCo(fragments=3)])
def test_memory_of_local_steps_is_what_is_held(rule: OuterRule) -> None:
    """Anchors, the outer optimizer's state once every fragment has moved, and one pseudo-gradient."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 32))
    specs = [TensorSpec(name, tuple(param.shape)) for name, param in model.named_parameters()]
    world = ThreadedWorld(2)

    def held(at: int) -> tuple[int, int]:
        comm = world.comms[at]
        sync = GradientSync(LoCo(beta=0.0), specs, Ranks.flat(comm), torch.device("cpu"), sharded=False)
        outer = OuterSync(sync, dict(model.named_parameters()), rule)
        for _ in range(3 * outer.round_length):  # what travels late has come by then
            outer.after_step()
        saved = outer.state_dict()
        ahead = saved["eager"] or {"offsets": {}, "optimizer": {}}
        states = [*saved["optimizer"].values(), *ahead["optimizer"].values(), ahead["offsets"]]
        state = [value for kept in states for value in kept.values()]
        kept = sum(value.nbytes for value in state if isinstance(value, torch.Tensor) and value.numel() > 1)
        return (
            sum(anchor.nbytes for anchor in outer.anchors.values())
            + kept
            + 4 * max(fragment.numel for fragment in outer.fragments)
        ), memory_of(plan_of(sync)).rounds

    found = [future.result() for future in [world._threads.submit(held, at) for at in range(2)]]
    world.close()
    for counted, planned in found:
        assert counted == planned


@pytest.mark.parametrize(("clip_norm", "whole"), [(1.0, True), (None, False)])
def test_what_waits_for_the_whole_model_is_reduced_at_once_however_it_is_cut(
    clip_norm: float | None, whole: bool
) -> None:
    """DGC that clips needs the norm of all gradients before any of them is sent."""
    specs = [TensorSpec(f"weight {at}", (512, 512)) for at in range(8)]
    assigned = assign_all(DGC(clip_norm=clip_norm, warmup_steps=0), specs)
    one, many = [ParamGroup(tuple(spec.name for spec in specs))], [ParamGroup((spec.name,)) for spec in specs]
    at_once, one_by_one = (
        memory_of(make_plan(specs, assigned, Topology(4), "ddp", reduced=reduced)).working for reduced in (one, many)
    )
    assert at_once > 0
    assert (one_by_one == at_once) is whole


@pytest.mark.parametrize("sharded", [False, True])
def test_memory_for_messages_is_what_is_announced(sharded: bool) -> None:
    sync = engine(LoCo(bits=4), sharded=sharded)
    for step in range(3):
        reduce_step(sync, gradients(step))
    assert 0 < sync.buffers.nbytes <= memory_of(plan_of(sync)).messages * (1.02 if sharded else 1.0) + 64
