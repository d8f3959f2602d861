"""Whether compression pays: what is recommended, what is to be measured, what is declined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lowbit_strategy.advisor import inputs
from lowbit_strategy.advisor.advice import ADVISE_MIN_SPEEDUP, Gain, Verdict, decide, gain_of, setup_options
from lowbit_strategy.advisor.cluster import Bench, Cluster, Coding, Link
from lowbit_strategy.advisor.inputs import Situation, What, find_machine, gather
from lowbit_strategy.advisor.workload import Workload, transformer


def verdict(params: float, nodes: int, ranks_per_node: int, machine: str = "", **said: str) -> Verdict:
    workload = Workload(transformer(params), nodes, ranks_per_node, itemsize=2)
    situation = gather(said, workload.numel, None, find_machine(machine) if machine else None)
    return decide(setup_options(workload, situation), workload, situation)


def certain(params: float, nodes: int, ranks_per_node: int, link: Link, compute_s: float, memory: float) -> str | None:
    """The name of what is best where nothing is uncertain."""
    workload = Workload(transformer(params), nodes, ranks_per_node, itemsize=2)
    situation = Situation(Cluster(inter_node=link, intra_node=Link(5e-6, 50e9)), compute_s, (), memory)
    choice = decide(setup_options(workload, situation), workload, situation).choice
    return None if choice is None else choice.name


def test_what_fits_is_chosen_and_no_ranks_are_needed() -> None:
    """Each rank of a node has an eighth of everything under HSDP. Under FSDP2 all have less."""
    slow = Link(1e-4, 10e9 / 8)
    names = [certain(7e9, 4, 8, slow, 0.9, memory) for memory in (100e9, 80e9, 13e9, 1e9)]
    assert not dist.is_initialized()
    assert names == ["loco_ddp", "loco_hsdp", "loco_fsdp", None]


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
