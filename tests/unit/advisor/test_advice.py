"""Whether compression pays: what is recommended, what is to be measured, what is declined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lowbit_strategy import LoCo
from lowbit_strategy.advisor import inputs
from lowbit_strategy.advisor.advice import (
    ADVISE_MIN_SPEEDUP,
    MEASURE_MIN_SPEEDUP,
    Gain,
    Verdict,
    break_even,
    decide,
    gain_of,
    setup_options,
)
from lowbit_strategy.advisor.cluster import Bench, Cluster, Coding, Link
from lowbit_strategy.advisor.cost import over_bandwidth, step_time
from lowbit_strategy.advisor.inputs import Situation, What, gather
from lowbit_strategy.advisor.machines import find_machine
from lowbit_strategy.advisor.transformer import transformer
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.advisor.workload import PRECISIONS, Workload, plan_for

SLOW, INSIDE = Link(0.01, 1e9 / 8), Link(5e-6, 50e9)


def verdict(params: float, nodes: int, ranks_per_node: int, machine: str = "", **said: str) -> Verdict:
    workload = Workload(transformer(params), nodes, ranks_per_node, itemsize=2)
    situation = gather(said, workload.numel, None, find_machine(machine) if machine else None)
    return decide(setup_options(workload, situation), workload, situation)


def certain(params: float, nodes: int, ranks_per_node: int, link: Link, compute_s: float, memory: float) -> str | None:
    """The name of what is best where nothing is uncertain."""
    workload = Workload(transformer(params), nodes, ranks_per_node, itemsize=2)
    situation = Situation(Cluster(inter_node=link, intra_node=INSIDE), compute_s, (), memory)
    choice = decide(setup_options(workload, situation), workload, situation).choice
    return None if choice is None else choice.name


def test_what_fits_is_chosen_and_no_ranks_are_needed() -> None:
    """Each rank of a node has an eighth of everything under HSDP. Under FSDP2 all have less."""
    slow = Link(1e-4, 10e9 / 8)
    names = [certain(7e9, 4, 8, slow, 0.9, memory) for memory in (150e9, 80e9, 16e9, 1e9)]
    assert not dist.is_initialized()
    assert names == ["loco_ddp", "loco_hsdp", "loco_fsdp", None]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rank_holds_what_its_precision_takes(precision: str) -> None:
    """Weight, gradient and two moments. The framework's own in float32 takes 16 bytes, whatever else is trained in."""
    itemsize, held = PRECISIONS[precision]
    assert held == {"32": 4 + 4 + 8, "bf16-mixed": 4 + 4 + 8, "bf16-true": 2 + 2 + 4}[precision]
    workload = Workload(transformer(1e9), 2, 8, itemsize, held)
    found = {each.name: each for each in setup_options(workload)}
    assert found["ddp, float32"].held_nbytes(workload) == 16 * workload.numel
    assert found["ddp, bf16"].held_nbytes(workload) == held * workload.numel
    assert found["fsdp, bf16"].held_nbytes(workload) == pytest.approx(held * workload.numel / 16)
    ours = found["loco_ddp"]
    assert ours.held_nbytes(workload) == held * workload.numel + ours.memory.total


def test_five_billion_parameters_do_not_fit_into_80_gb_under_ddp() -> None:
    found = verdict(5e9, 2, 8, link="1gbit")
    assert found.choice is not None
    assert found.choice.name in ("loco_hsdp", "loco_fsdp")


def test_a_plain_no_needs_the_whole_range() -> None:
    """The likely gain alone says no, and a link that reaches 0.18 to 0.38 of its nominal rate says yes."""
    said = {"link": "10gbit", "latency": "50us", "compute": "1s", "inside": "130GB/s"}
    found = verdict(3e8, 2, 1, **said)
    assert found.gain is not None
    assert found.gain.likely < ADVISE_MIN_SPEEDUP < MEASURE_MIN_SPEEDUP < found.gain.high
    assert found.answer == "measure"
    assert found.sentence.startswith("Measure: it may help, loco_ddp is probably 1.0")
    assert "`torchrun --nnodes 2 --rdzv-backend c10d" in found.sentence
    narrower = verdict(3e8, 2, 1, **said | {"compute": "20s"})
    assert narrower.answer == "no"


def test_links_without_rdma_may_reach_less() -> None:
    def link(machine: str = "", rdma: bool | None = None, **said: str) -> tuple[float, float]:
        found = gather(said, 10**9, None, find_machine(machine) if machine else None, rdma=rdma)
        return next((each.low, each.high) for each in found.figures if each.what == "link")

    assert link(link="20gbit") == link("g5") == link("p4d", rdma=False) == (0.15, 1.25)
    assert link(link="20gbit", rdma=True) == link("p4d") == link("p4d", link="400gbit") == (0.3, 1.25)
    assert link() == (0.1, 10.0)


def test_what_was_measured_is_tried_in_training() -> None:
    cluster = Cluster(inter_node=Link(5e-5, 1e9), intra_node=Link(1e-5, 1e10), codings={"loco": Coding(1e9)})
    workload = Workload(transformer(3e8), 2, 1, itemsize=2)
    situation = gather({"compute": "0.5s"}, workload.numel, Bench(version="", nodes=2, cluster=cluster))
    found = decide(setup_options(workload, situation), workload, situation)
    assert found.answer == "measure"
    assert found.sentence.endswith('strategy="lowbit_ddp" times it in its first steps, and keeps what is faster.')


def test_the_comparison_is_with_the_precision_that_is_trained_in() -> None:
    """Gradients of float32 are twice as long as those of bf16."""
    gains = []
    for precision in ("32", "bf16-mixed"):
        workload = Workload(transformer(1e9), 4, 1, *PRECISIONS[precision])
        situation = gather({"link": "1gbit", "compute": "0.3s", "memory": "200GB"}, workload.numel)
        found = decide(setup_options(workload, situation), workload, situation)
        assert found.gain is not None
        assert f"times as fast as {workload.baseline} without compression" in found.sentence
        gains.append(found.gain.likely)
    assert gains[0] == pytest.approx(2 * gains[1], rel=0.1)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (1, {}),
        (1, {"machine": "p4d"}),
        (4, {"link": "400gbit", "latency": "10us", "compute": "0.5s"}),
        (4, {"machine": "p5"}),
        (4, {"machine": "dgx-h100"}),
    ],
)
@pytest.mark.parametrize("params", [pytest.param(1e9, marks=pytest.mark.slow), 7e9])
def test_fast_clusters_get_no_plain_yes(params: float, nodes: int, said: dict[str, str]) -> None:
    found = verdict(params, nodes, 8, **said)
    assert found.answer in ("no", "measure")
    assert "Use:" not in found.sentence
    assert nodes > 1 or "two machines" not in found.sentence


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "said"),
    [
        (4, 8, {"link": "10gbit", "latency": "0.1ms", "compute": "0.9s", "inside": "300GB/s"}),
        (4, 1, {"link": "1gbit", "compute": "0.3s"}),
        (4, 1, {"machine": "home-1gbit"}),
    ],
)
def test_slow_links_get_a_line_to_paste(nodes: int, ranks_per_node: int, said: dict[str, str]) -> None:
    found = verdict(1e9, nodes, ranks_per_node, **said)
    assert found.answer == "use"
    assert found.sentence.startswith('Use: strategy="loco_')
    assert found.gain is not None
    assert ADVISE_MIN_SPEEDUP < found.gain.low <= found.gain.likely <= found.gain.high


def test_what_does_not_fit_is_never_recommended() -> None:
    found = verdict(1e11, 16, 8)
    assert found.answer == "no"
    assert "80 GB of a device (assumed), the framework's own does" in found.sentence
    found = verdict(7e9, 2, 8, memory="1GB")
    assert "1 GB of a device (given), nor does the framework's own" in found.sentence


def test_a_rank_alone_has_nothing_to_send() -> None:
    assert "one rank sends nothing" in verdict(1e8, 1, 1).sentence


def test_the_range_of_a_gain_holds_that_of_any_figures_within_theirs() -> None:
    workload, said = Workload(transformer(1e9), 4, 8, itemsize=2), {"link": "100gbit", "compute": "0.2s"}
    situation = gather(said, workload.numel)
    found = setup_options(workload, situation)
    (ours,) = [each for each in found if each.name == "loco_fsdp"]
    own = [each for each in found if each.name.endswith("bf16")]
    gain = gain_of(ours, own, situation)

    def certain(times: dict[What, float]) -> Gain:
        at = situation.at(times)
        return gain_of(ours, own, Situation(at.cluster, at.compute_s))

    for share in (0.0, 0.3, 0.5, 0.8, 1.0):
        likely = certain({each.what: each.low ** (1 - share) * each.high**share for each in situation.figures}).likely
        assert gain.low <= likely <= gain.high


def test_every_machine_has_its_figures_and_its_source() -> None:
    table = json.loads(Path(inputs.__file__).with_name("machines.json").read_text())
    for name in table:
        machine = find_machine(name.upper())
        assert machine["source"]
        assert machine["gpus"] >= 1
        situation = gather({}, 10**9, None, machine)
        figures = {each.what: each for each in situation.figures}
        assert {each.source for what, each in figures.items() if what != "coding"} == {"nominal"}
        assert 1e6 < figures["link"].value < 1e12
        assert 1e-6 < figures["latency"].value < 1
        assert 1e9 < figures["inside"].value < 1e12
        assert 10e9 < (situation.memory_nbytes or 0) < 300e9
    with pytest.raises(ValueError, match=r"'p4e' is not known.*p4d.*home-1gbit"):
        find_machine("p4e")


def test_measured_links_count_but_for_those_that_are_given() -> None:
    ring = Link(2e-3, 5e7)
    link, near = Link(1e-3, 1e8, ((1e5, 1e-4), (1e6, 1e-2)), ring), Link(1e-5, 1e10)
    cluster = Cluster(inter_node=link, intra_node=near, gloo=True, codings={"loco": Coding(1e9)})
    measured = Bench(version="", nodes=2, ranks_per_node=2, cluster=cluster)
    found = gather({"compute": "1s"}, 1, measured)
    assert found.cluster == cluster.coding_as("loco")
    assert {each.source for each in found.figures if each.what != "compute"} == {"measured"}
    given = gather({"compute": "1s", "link": "1gbit"}, 1, measured)
    assert given.cluster.inter_node == Link(1e-3, 1e9 / 8)
    assert given.cluster.intra_node == near
    alone = gather({"compute": "1s"}, 1, replace(measured, nodes=1))
    assert [each.source for each in alone.figures] == ["assumed", "assumed", "measured", "measured", "given"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
def test_break_even_is_where_both_are_as_fast(layout: str) -> None:
    workload = Workload(transformer(1e9), 4, 2, itemsize=2)
    plan = plan_for(workload, layout, LoCo())  # type: ignore[arg-type]
    stock = uncompressed(plan, 2)
    at = break_even(*(over_bandwidth(each, Cluster(inter_node=SLOW, intra_node=INSIDE), 0.5) for each in (plan, stock)))
    assert at is not None
    for factor, faster in ((0.5, True), (2.0, False)):
        if at * factor < 5e11:
            link = Cluster(inter_node=Link(SLOW.latency_s, at * factor), intra_node=INSIDE)
            assert (step_time(plan, link, 0.5).seconds < 0.99 * step_time(stock, link, 0.5).seconds) is faster
