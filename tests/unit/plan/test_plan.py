"""A plan says what the engine would send and keep, for any model and any number of ranks, without either."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lowbit_strategy import PRESETS, DiLoCo, Exact, LoCo, TopK, WeightCode, WeightDelta
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.plan.reduced import ddp_buckets
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.ranks.topology import Topology
from testing.invariants.harness import CONFIGURATIONS, LAST_STEP, InvariantHarness
from testing.large_model import plan_of_llama
from testing.worlds.threaded import ThreadedWorld


@pytest.mark.parametrize(
    ("wrapper", "size", "coding", "outer"),
    [
        ("ddp", None, None, None),
        ("ddp", 8, None, None),
        ("ddp", None, None, DiLoCo(fragments=4)),
        ("fsdp", None, WeightCode(), None),
        ("fsdp", 8, WeightCode(), None),
        ("hsdp", 8, Exact(), None),
        ("hsdp", 8, WeightDelta(), DiLoCo()),
    ],
)
def test_seventy_billion_parameters_on_a_thousand_ranks(
    wrapper: Wrapper, size: int | None, coding: WeightCoding | None, outer: OuterRule | None
) -> None:
    assert not dist.is_initialized()
    plan = plan_of_llama(wrapper, size, coding, outer)
    numel = sum(spec.whole.numel for spec in plan.specs.values())
    assert 70.0e9 < numel < 70.7e9
    hops = 1 if wrapper == "fsdp" else 2
    per_element = plan.sent_nbytes / numel * (size or 1) / hops
    assert 0.51 < per_element < 0.60  # 4 bits and a scale per block; embedding and head in 8 bits; padding
    if size is not None:
        assert plan.between_nbytes == plan.sent_nbytes


class Calls:
    """How many collectives a rank has begun."""

    def __init__(self, comm: Any) -> None:
        self.count = 0
        for name in ("all_to_all", "all_to_all_uneven", "all_gather", "all_reduce", "broadcast"):
            setattr(comm, name, self._counted(getattr(comm, name)))

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return call(*args, **options)

        return counted


@pytest.mark.parametrize("world_size", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_messages_in_series_are_the_collectives_of_a_step(name: str, layout: Any, world_size: int) -> None:
    """Every method, all parameters in one bucket: as many collectives as planned, one after the other."""
    world = ThreadedWorld(world_size)
    counted = []

    def rank(at: int) -> tuple[int, int]:
        comm = world.comms[at]
        harness = InvariantHarness(name, layout, comm)
        sync = harness.sync()
        calls = Calls(comm)
        for step in range(LAST_STEP + 1):
            before = calls.count
            harness.run(sync, harness.grads(step))
        (unit,) = plan_of(sync).gradients
        return calls.count - before, unit.in_series

    counted = [future.result() for future in [world._threads.submit(rank, at) for at in range(world_size)]]
    world.close()
    for issued, planned in counted:
        assert issued in ((planned, planned + 1) if name in ("exdyna", "micro") else (planned,))


def test_buckets_are_those_of_ddp() -> None:
    """The last parameters first, the first bucket small, one dtype in each."""
    params = [("a", 2**20, 4), ("b", 2**20, 4), ("c", 2**23, 2), ("d", 10, 2), ("e", 2**19, 2)]
    assert [each.names for each in ddp_buckets(params)] == [("e",), ("d", "c"), ("b", "a")]
    assert [each.names for each in ddp_buckets(params, 2**22)] == [("e",), ("d", "c"), ("b",), ("a",)]
    assert [each.itemsize for each in ddp_buckets(params)] == [2, 2, 4]


def test_what_is_exempt_is_in_the_plan() -> None:
    specs = [TensorSpec("weight", (512, 512)), TensorSpec("bias", (512,))]
    plan = make_plan(specs, assign_all(LoCo(), specs), Topology(4), "ddp")
    assert {name: a.kind for name, a in plan.assignments.items()} == {"weight": "compressed", "bias": "exempt"}
    assert plan.assignments["bias"].reason
    assert plan.in_series == 2


@pytest.mark.parametrize("compressor", [LoCo(), TopK(), *(PRESETS[name] for name in ("powersgd", "gtopk"))])
def test_nothing_travels_on_one_rank(compressor: Any) -> None:
    specs = [TensorSpec("weight", (512, 512))]
    plan = make_plan(specs, assign_all(compressor.phase(10**6), specs), Topology(1), "ddp")
    assert plan.sent_nbytes == plan.in_series == 0
