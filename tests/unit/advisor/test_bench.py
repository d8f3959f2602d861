"""``lowbit bench`` alone and among ranks, and ``lowbit advise --bench`` with its file."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.progress import Progress
from typer.testing import CliRunner

from lowbit_strategy.advisor import clocks, links
from lowbit_strategy.advisor.advice import BITS
from lowbit_strategy.advisor.bench import _SLOW, _measure, this_machine
from lowbit_strategy.advisor.bench_file import Bench, read_bench
from lowbit_strategy.advisor.cluster import ANY_RATE, Coding, Link, Rings, Work
from lowbit_strategy.advisor.inputs import cluster_of
from lowbit_strategy.advisor.pairs import MOST_PAIRS, measure_pairs, pairs_to_measure
from lowbit_strategy.cli import app
from lowbit_strategy.collectives.comm import GroupComm, LocalComm
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.ranks.topology import Topology
from testing.processes.ranks import run_ranks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_NUMEL", {"cpu": 1 << 14})


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    return result.exit_code, result.output


@pytest.mark.slow
def test_alone_codecs_are_measured_and_advise_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "bench.json"
    code, output = invoke("bench", "--cpu", "--out", str(path))
    assert code == 0, output
    assert "million elements/s" in output
    measured = read_bench(path, this_machine(cpu=True))
    assert measured.levels == {}
    assert {"loco", "qsgd", "topk", "powersgd"} <= measured.codings.keys() <= PRESETS.keys()
    assert all(coding.numel_per_s > 0 < coding.bucket_s for coding in measured.codings.values())
    code, output = invoke("advise", "--params", "1e8", "--link", "1gbit", "--cpu", "--bench", str(path))
    assert code == 0, output
    assert "measured: coding " in output
    assert f", in {path}" in output
    assert "given: link 1gbit; " in output
    content = json.loads(path.read_text())
    content["version"] = "0.0.1"
    path.write_text(json.dumps(content))
    code, output = invoke("advise", "--params", "1e8", "--cpu", "--bench", str(path))
    assert code == 2
    assert "measure again with lowbit bench" in output


@pytest.mark.parametrize(("world_size", "expected"), [(1, PRESETS.keys() - _SLOW), (2, BITS.keys())])
def test_where_links_take_long_only_codecs_that_are_compared_are_measured(
    world_size: int, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "measure_coding", lambda *_: Coding(1e9))
    monkeypatch.setattr("lowbit_strategy.advisor.bench._links", lambda *_: {})
    monkeypatch.setattr(dist, "all_gather_object", lambda *_: None)
    measured = _measure(torch.device("cpu"), world_size, Progress(disable=True))
    assert measured.codings.keys() == expected


def measuring(rank: int, world_size: int) -> Any:
    done: list[int] = []
    pairs = measure_pairs(Topology(3, (2, 1)), torch.device("cpu"), lambda: done.append(1))
    return pairs, len(done)


def test_pairs_among_ranks() -> None:
    results = run_ranks(measuring, 3, timeout=60)
    pairs, done = results[0]
    assert all(each == results[0] for each in results)
    assert done == 3
    assert [(pair.first, pair.second, pair.level) for pair in pairs] == [
        (0, 1, "intra-node"),
        (0, 2, "inter-node"),
        (1, 2, "inter-node"),
    ]
    assert all(0 < pair.latency_s < 1 and pair.nbytes_per_s > 1e5 and pair.streams_nbytes_per_s > 1e5 for pair in pairs)


def test_of_many_ranks_some_pairs_are_measured() -> None:
    assert len(pairs_to_measure(12)) == 66
    chosen = pairs_to_measure(1000)
    assert len(chosen) <= MOST_PAIRS + 2
    assert all(first < second < 1000 for first, second in chosen)


def test_a_rank_alone_has_no_link() -> None:
    device = torch.device("cpu")
    link = links.measure_link(LocalComm(), links.ComputeLoad(LocalComm(), device))
    assert link.nbytes_per_s == ANY_RATE
    assert link.work is None
    assert clocks.measure_coding(LoCo(), device).numel_per_s > 0


def test_a_time_that_disappears_in_that_of_computing_is_unknown_tenfold() -> None:
    near = links.ComputeLoad(LocalComm(), torch.device("cpu"))
    assert near.spread_of([0.8, 0.9, 1.0, 1.1, 1.2]) == pytest.approx(0.1)
    assert near.spread_of([-2e-3, -1e-3, 0.0, 1e-3, 2e-3]) == pytest.approx(10)


def test_a_small_bucket_that_was_disturbed_makes_no_codec_faster() -> None:
    assert clocks.numel_per_s(10, 0.1, 1010, 1.1) == pytest.approx(1000)
    assert clocks.numel_per_s(10, 0.9, 1010, 1.0) == pytest.approx(1010), "the difference would say ten times as much"
    assert clocks.numel_per_s(10, 2.0, 1010, 1.0) == pytest.approx(1010)


def test_the_rate_is_that_of_what_a_link_does_not_let_pass_at_once() -> None:
    """A link that lets 1 MB pass at once and then sends 2 MB in a second."""
    assert links.rate_of([(1e6, 0.0), (3e6, 1.0), (9e6, 4.0)]) == pytest.approx(2e6)
    assert links.rate_of([(3e6, 1.0)]) == pytest.approx(3e6)
    assert links.rate_of([(3e6, 1.0), (9e6, 1.0)]) == pytest.approx(9e6), "too little to tell"
    assert links.rate_of([(3e6, 0.0), (9e6, 0.0)]) == ANY_RATE


@pytest.mark.slow
@pytest.mark.parametrize("far", [False, True])
def test_a_measured_link_has_the_time_of_every_size_and_none_that_falls(far: bool) -> None:
    for measured in run_ranks(measured_links, 2, far, timeout=60):
        for found in measured:
            sizes, seconds = zip(*found.measured, strict=True)
            assert list(sizes) == sorted(sizes)
            assert (sizes[-1] == 2 * sizes[-2]) is far, "between far ranks the half of the longest is there"
            assert list(seconds) == sorted(seconds)
            assert found.traveling_s(sizes[-1]) == pytest.approx(seconds[-1], rel=1e-12)  # interpolated
            assert found.work.message_s < 0.1
            assert found.work.nbyte_s < 1e-6


def measured_links(rank: int, world_size: int, far: bool) -> Any:
    comm = GroupComm()
    turns = links.ComputeLoad(comm, torch.device("cpu"), far=far)
    assert 1.0 <= turns.cpu_oversubscription < 100
    return links.measure_link(comm, turns), links.measure_ring(comm, turns, 1)


@pytest.mark.slow
def test_ranks_find_a_collective_equally_slow_and_between_far_ones_its_fastest_call_counts() -> None:
    costs = run_ranks(costs_near_and_far, 2, timeout=60)
    assert costs[0] == costs[1]
    near, far, inside = costs[0]
    assert far < 0.5 * near
    assert far < 0.5 * inside, "inside a node of far ones it does not"


def costs_near_and_far(rank: int, world_size: int) -> tuple[float, ...]:
    """One call of three is fast, and in the others one rank waits for the other."""
    comm, costs = GroupComm(), []
    near, far = (links.ComputeLoad(comm, torch.device("cpu"), far=far) for far in (False, True))
    for turns in (near, far, far.inside_a_node()):
        calls = itertools.count()

        def call(calls: Iterator[int] = calls) -> None:
            at = next(calls) % 3
            time.sleep(0.01 if at == 2 else 0.2 if at == rank else 0.0)
            comm.all_reduce(torch.zeros(1)).wait()

        costs.append(turns.cost_of(comm, call)[0])
    return tuple(costs)


@pytest.mark.slow
def test_ranks_of_a_node_begin_every_far_message_together() -> None:
    """Though one of them needs longer for each: one after the other, each would have their link to itself."""
    first, second = run_ranks(far_calls_begin, 2, timeout=60)
    apart = [abs(a - b) for a, b in zip(first, second, strict=True)][-3:]  # those that are timed
    assert len(apart) == 3
    assert statistics.median(apart) < 0.1  # one after the other they are 0.1 s further apart with each


def far_calls_begin(rank: int, world_size: int) -> list[float]:
    comm, begun = GroupComm(), []
    comm.is_far = True

    def call() -> None:
        begun.append(time.monotonic())
        time.sleep(0.1 * rank)

    turns = links.ComputeLoad(comm, torch.device("cpu"), far=True, near=GroupComm())
    turns.cost_of(comm, call)
    return begun


@pytest.mark.slow
@pytest.mark.parametrize("far", [False, True])
def test_ranks_of_a_node_whose_links_are_of_different_speed_measure_as_often(far: bool) -> None:
    """They begin each message together, so one that measured more often would wait for the other for ever."""
    counts = run_ranks(calls_of_two_links, 4, far, timeout=60)
    assert len(set(counts)) == 1


def calls_of_two_links(rank: int, world_size: int, far: bool) -> int:
    """Ranks 0 and 2 reach each other ten times faster than 1 and 3."""
    near, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    peers, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    comm, times = GroupComm(peers), 0
    comm.is_far = far

    def call() -> None:
        nonlocal times
        times += 1
        time.sleep(0.15 if rank % 2 else 0.015)
        comm.all_reduce(torch.zeros(1)).wait()

    between = [comm] if far else []  # with the ranks of a node they reach all
    turns = links.ComputeLoad(GroupComm(), torch.device("cpu"), far=far, near=GroupComm(near), between=between)
    turns.cost_of(comm, call)
    return times


@pytest.mark.slow
def test_what_ranks_do_between_far_messages_is_no_work_of_a_message() -> None:
    (worked,) = run_ranks(busy_between_calls, 1, timeout=60)
    assert worked < 0.01


def busy_between_calls(rank: int, world_size: int) -> float:
    """The processor time of a message that takes none; 0.02 s pass before each."""
    comm = GroupComm()
    comm.is_far = True

    def meet(*_: Any) -> None:
        began = time.process_time()
        while time.process_time() - began < 0.02:
            pass

    turns = links.ComputeLoad(comm, torch.device("cpu"), far=True, near=comm)
    with mock.patch.object(links, "_highest", meet):
        return turns.cost_of(comm, lambda: None)[1]


def test_advise_predicts_with_all_that_was_measured_and_without_rings_of_links_that_were_given() -> None:
    link = Link(1e-3, 1e8, ((1e5, 1e-4), (1e6, 1e-2)))
    measured = Bench(
        version="",
        machines=(),
        nodes=2,
        ranks_per_node=1,
        backend="gloo",
        levels={"inter-node": link, "intra-node": link},
        pairs=(),
        rings=Rings(link, link),
        codings={"loco": Coding(1e9)},
        memcpy_nbytes_per_s=1e10,
    )
    cluster, figures = cluster_of({}, measured)
    assert cluster == measured.cluster()
    assert {each.source for each in figures} == {"measured"}
    given, _ = cluster_of({"link": "1gbit"}, measured)
    assert (given.inter_node.latency_s, given.inter_node.nbytes_per_s) == (1e-3, 1e9 / 8)
    assert given.rings is None
    work = Work(1e-3, 1e-9)  # on a machine alone: what messages to others take is not known better than this
    alone = replace(measured, nodes=1, levels={"intra-node": replace(link, work=work)}, cpu_oversubscription=2.0)
    given, _ = cluster_of({"link": "1gbit", "latency": "1ms"}, alone)
    assert (given.inter_node.work, given.intra_node.work, given.cpu_oversubscription) == (work, work, 2.0)
    apart = replace(measured, levels={"inter-node": replace(link, work=work)})
    given, _ = cluster_of({}, apart)
    assert given.intra_node.work == work
