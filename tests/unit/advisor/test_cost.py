"""Step times predicted from numbers: laws that any prediction must obey, and figures that others published."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_steps import rows
from lowbit_strategy import OUTER_RULES, PRESETS, LoCo
from lowbit_strategy.advisor.cluster import Cluster, Coding, Link
from lowbit_strategy.advisor.cost import Ring, message_cost, step_time
from lowbit_strategy.advisor.transformer import transformer
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.advisor.workload import Workload, plan_for
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.plan.messages import Message
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology

SLOW = Link(0.01, 1e9 / 8)


def cluster(link: Link = SLOW) -> Cluster:
    return Cluster(inter_node=link, intra_node=Link(5e-6, 50e9))


def test_one_bucket_takes_its_latencies_and_its_bytes() -> None:
    """`T = messages in series x latency + bytes / bandwidth`, after all of backward."""
    specs = [TensorSpec("weight", (1024, 1024))]
    topology = Topology(4, (1,) * 4)
    plan = make_plan(specs, assign_all(LoCo(), specs), topology, "ddp", reduced=[ParamGroup(("weight",))])
    (unit,) = plan.gradients
    nbytes = sum(message.total_nbytes for message in unit.messages)
    found = step_time(plan, cluster(), 0.5).seconds
    assert found == pytest.approx(0.5 + 2 * SLOW.latency_s + nbytes / SLOW.nbytes_per_s)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["loco", "dense", "topk"])
def test_a_prediction_lies_between_its_bounds_and_grows_with_worse_links(layout: str, name: str) -> None:
    workload = Workload(transformer(1e9), 4, 2, itemsize=2)
    plan = plan_for(workload, layout, PRESETS[name])  # type: ignore[arg-type]
    before = 0.0
    for nbytes_per_s in (1e12, 1e10, 1e9, 1e8, 1e7):
        link = Link(1e-4, nbytes_per_s)
        found = step_time(plan, cluster(link), 0.5)
        assert 0.5 <= found.low <= found.seconds <= found.high
        assert found.seconds >= before
        assert step_time(plan, cluster(Link(1e-2, nbytes_per_s)), 0.5).seconds >= found.seconds
        before = found.seconds


def test_messages_take_what_was_measured_of_their_sizes_and_longer_ones_the_rate_beyond() -> None:
    link = Link(1e-3, 1e6, ((1e3, 0.0), (1e4, 5e-3), (1e5, 9e-2)))
    known = [link.traveling_s(nbytes) for nbytes in (0, 1e3, 5.5e3, 1e4, 1e5, 1.1e6)]
    assert known == pytest.approx([0.0, 0.0, 2.5e-3, 5e-3, 9e-2, 1.09])
    assert [link.shared_by(4).traveling_s(4 * nbytes) for nbytes in (0, 1e3, 5.5e3, 1e4, 1e5, 1.1e6)] == pytest.approx(
        known
    )
    assert Link(1e-3, 1e6).traveling_s(1e3) == 1e-3


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 10)), max_size=5), st.floats(0, 2e9), st.floats(0, 2e9))
def test_more_bytes_never_travel_faster(points: list[tuple[float, float]], one: float, other: float) -> None:
    sizes, seconds = (sorted(values) for values in zip(*points, strict=True)) if points else ([], [])
    link = Link(1e-3, 1e8, tuple(zip(sorted(set(sizes)), seconds, strict=False)))
    less, more = sorted((one, other))
    assert link.traveling_s(less) <= link.traveling_s(more) * (1 + 1e-9)


def test_what_a_message_alone_is_slower_by_is_waited_for_like_a_latency() -> None:
    """As where a connection begins slowly: others can travel meanwhile, and the link is busy for the bytes alone."""
    link = Link(1e-3, 1e6, ((1e3, 5e-4), (1e4, 3e-2)))
    assert link.split_s(1e3)[0] == 0.0  # it passes faster than the rate says
    assert link.split_s(1e4) == pytest.approx((2e-2, 1e-2))
    at = replace(cluster(link), intra_node=link)
    message = Message("flat", "rows", 10_000, in_series=1, internode_fraction=1.0)
    found = message_cost(message, at, 1)
    assert (found.latency, found.busy) == pytest.approx((2.1e-2, 1e-2))


def test_buckets_are_those_of_the_strategy_and_of_ddp() -> None:
    """A strategy makes DDP's buckets smaller on CPU and larger on GPUs; without compression they are DDP's own."""
    specs = [TensorSpec(f"weight {at}", (512, 512)) for at in range(160)]  # a MiB each
    found = {}
    for device_type in ("cpu", "cuda"):
        workload = Workload(specs, 2, 1, device_type=device_type)
        plan = plan_for(workload, "ddp", PRESETS["loco"])
        found[device_type] = len(plan.gradients)
        stock = uncompressed(plan, 4).gradients
        assert len(stock) == 1 + -(-159 // 25)
        assert sum(unit.numel for unit in stock) == workload.numel
    assert found == {"cpu": 1 + -(-159 // 8), "cuda": 1 + -(-159 // 128)}


def test_messages_in_series_share_the_bytes() -> None:
    """Each of them is as short as its share."""
    link = Link(0.0, 1e6, ((100.0, 0.0), (1000.0, 9e-4)))
    at = cluster(replace(link, ring=link))
    for kind in (Message, Ring):
        for in_series, expected in ((1, 9e-4), (10, 0.0)):
            found = message_cost(kind("flat", "rows", 1000, in_series=in_series, internode_fraction=1.0), at, 1)
            assert (found.latency, found.busy) == (0.0, pytest.approx(expected))


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (2, 2)])
def test_modules_of_fsdp_leave_at_once_where_ranks_are_far(nodes: int, per_node: int) -> None:
    """Twelve modules: the weights' latency once, and that of the last gradients."""
    specs = [TensorSpec(f"blocks.{at}.weight", (256, 256)) for at in range(12)]
    plan = plan_for(Workload(specs, nodes, per_node, device_type="cpu"), "fsdp", PRESETS["loco"])
    far = replace(plan, topology=replace(plan.topology, far=True))
    at = Cluster(inter_node=Link(0.05, 1e12), intra_node=Link(0.0, 1e12), gloo=True)
    latencies = step_time(far, at, 0.0).seconds / 0.05
    assert 2 <= latencies < 4


def test_the_outermost_module_is_gathered_once_a_step() -> None:
    plan = uncompressed(plan_for(Workload(transformer(1e9), 4, 1, itemsize=2), "fsdp", LoCo()), 2)
    assert {unit.name: unit.repeats for unit in plan.weights if unit.repeats != 2} == {"root": 1}


def test_gloo_scatters_by_an_all_reduce_and_waits_for_each_collective() -> None:
    plan = uncompressed(plan_for(Workload(transformer(1e9), 4, 1, itemsize=2), "fsdp", LoCo()), 2)
    link = Link(1e-3, 1e9)
    at = replace(cluster(replace(link, ring=link)), gloo=True)
    gradients, weights = (
        sum(unit.repeats * (m.in_series * 1e-3 + m.total_nbytes / 1e9) for unit in units for m in unit.messages)
        for units in (plan.gradients, plan.weights)
    )
    assert step_time(plan, at, 0.5).seconds == pytest.approx(0.5 + 2 * gradients + weights)


def test_published_figures_are_near_their_predictions_and_inside_their_ranges() -> None:
    """By the quantity that was published: two of three within a fifth, nine of ten inside."""
    found = rows()
    assert len(found) >= 15
    assert sum(row.within for row in found) / len(found) >= 2 / 3
    assert sum(row.inside for row in found) / len(found) >= 9 / 10


def test_no_plain_answer_about_a_published_run_is_wrong() -> None:
    """Over 100 Gbit/s of plain TCP the likely figure alone says no, and 8 bits were 1.45 times as fast."""
    answered = [row for row in rows() if row.right is not None]
    assert [row for row in answered if not row.right] == []
    assert {row.answer for row in answered} == {"use", "measure"}


def random_plans() -> st.SearchStrategy[StepPlan]:
    """Of any layout, with and without compression and with local steps, over one level or two."""

    def plan_of(layout: str, name: str, numel: float, nodes: int, per_node: int, own: bool) -> StepPlan:
        outer = OUTER_RULES.get(name) if layout != "fsdp" and not own else None
        workload = Workload(transformer(numel), nodes, per_node, itemsize=2)
        compressor = PRESETS["loco" if name in OUTER_RULES else name]
        rounds = None if outer is None else outer.planned()
        plan = plan_for(workload, layout, compressor, round_plan=rounds)  # type: ignore[arg-type]
        return uncompressed(plan, 2) if own else plan

    layouts, names = st.sampled_from(["ddp", "fsdp", "hsdp"]), st.sampled_from(["loco", "powersgd", "dense", "diloco"])
    sizes = st.sampled_from([2e7, 1e8, 4e8]), st.integers(1, 5), st.integers(1, 4)
    return st.builds(plan_of, layouts, names, *sizes, st.booleans())


def random_links() -> st.SearchStrategy[Link]:
    """As given, or as measured, at up to four sizes."""
    points = st.lists(st.tuples(st.floats(1e4, 4e6), st.floats(1e-5, 0.5)), max_size=4)
    measured = points.map(lambda steps: tuple(itertools.accumulate(steps, lambda a, b: (a[0] + b[0], a[1] + b[1]))))
    return st.builds(Link, st.floats(1e-6, 0.2), st.floats(1e6, 1e12)) | st.builds(
        Link, st.floats(1e-6, 0.2), st.floats(1e6, 1e12), measured
    )


@settings(max_examples=5 * settings.default.max_examples)
@given(
    random_plans(),
    random_links(),
    random_links(),
    st.floats(1e-3, 10.0),
    st.floats(1.0, 50.0),
    st.booleans(),
    st.booleans(),
)
def test_more_bandwidth_is_never_slower_and_more_latency_never_faster(
    plan: StepPlan,
    between: Link,
    inside: Link,
    compute_s: float,
    times: float,
    gloo: bool,
    far: bool,
) -> None:
    plan = replace(plan, topology=replace(plan.topology, far=far))
    at = Cluster(inter_node=between, intra_node=inside, coding=Coding(1e10), gloo=gloo)
    step = step_time(plan, at, compute_s)
    for better in (at.scaled(link=times), at.scaled(inside=times), at.scaled(latency=1 / times)):
        faster = step_time(plan, better, compute_s)
        for bound in ("low", "seconds", "high"):
            assert getattr(faster, bound) <= getattr(step, bound) * (1 + 1e-9)


def test_a_ring_keeps_the_pace_of_its_slowest_link() -> None:
    plan = uncompressed(plan_for(Workload(transformer(1e9), 2, 4, itemsize=2), "ddp", LoCo()), 2)
    nbytes = sum(message.nbytes for unit in plan.gradients for message in unit.messages)
    for between, inside, slowest in ((1e9, 1e12, 1e9), (1e12, 1e9, 1e9)):
        at = Cluster(inter_node=Link(0.0, between), intra_node=Link(0.0, inside))
        assert step_time(plan, at, 0.0).high == pytest.approx(nbytes / slowest, rel=0.3)


def test_a_rank_alone_sends_and_codes_nothing() -> None:
    for layout in ("ddp", "fsdp"):
        plan = plan_for(Workload(transformer(1e8), 1, 1, itemsize=2), layout, LoCo())  # type: ignore[arg-type]
        at = replace(cluster(), coding=Coding(1e9, 1e-3))
        assert step_time(uncompressed(plan, 2), at, 0.5).high == 0.5


@pytest.mark.parametrize(("device", "expected"), [("cpu", 8), ("cuda", 128), ("mps", 128), ("xpu", 128)])
def test_every_device_has_a_size_of_buckets(device: str, expected: int) -> None:
    assert default_bucket_cap_mb(torch.device(device)) == expected
