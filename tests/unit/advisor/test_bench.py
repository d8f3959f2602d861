"""``lowbit bench`` alone and among ranks, and ``lowbit advise --bench`` with its file."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from lowbit_strategy.advisor import measured
from lowbit_strategy.advisor.cluster import ANY_RATE, Bench, read_bench
from lowbit_strategy.cli import app
from lowbit_strategy.collectives.comm import GroupComm, LocalComm
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.ranks.ranks import Ranks
from testing.processes.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_NUMEL", {"cpu": 1 << 14})


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
    measured = read_bench(path)
    assert measured.nodes == measured.ranks_per_node == 1
    codings = measured.cluster.codings
    assert {"loco", "qsgd", "topk", "powersgd"} <= codings.keys() <= PRESETS.keys()
    assert all(coding.numel_per_s > 0 < coding.bucket_s for coding in codings.values())
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


def test_a_rank_alone_has_no_link() -> None:
    found = measured.measure(["loco"], CPU)
    assert found.cluster.inter_node.nbytes_per_s == ANY_RATE
    assert measured.measure_coding(LoCo(), CPU).numel_per_s > 0


def test_a_small_bucket_that_was_disturbed_makes_no_codec_faster() -> None:
    assert measured.numel_per_s(10, 0.1, 1010, 1.1) == pytest.approx(1000)
    assert measured.numel_per_s(10, 0.9, 1010, 1.0) == pytest.approx(1010), "the difference would say ten times as much"
    assert measured.numel_per_s(10, 2.0, 1010, 1.0) == pytest.approx(1010)


def test_the_rate_is_that_of_what_a_link_does_not_let_pass_at_once() -> None:
    """A link that lets 1 MB pass at once and then sends 2 MB in a second."""
    assert measured.rate_of([(1e6, 0.0), (3e6, 1.0), (9e6, 4.0)]) == pytest.approx(2e6)
    assert measured.rate_of([(3e6, 1.0)]) == pytest.approx(3e6)
    assert measured.rate_of([(3e6, 1.0), (9e6, 1.0)]) == pytest.approx(9e6), "too little to tell"
    assert measured.rate_of([(3e6, 0.0), (9e6, 0.0)]) == ANY_RATE


def test_all_ranks_have_the_same_links_whose_times_never_fall() -> None:
    found = run_ranks(measured_links, 2, timeout=60)
    assert found[0] == found[1]
    assert (found[0].nodes, found[0].ranks_per_node) == (1, 2)
    link = found[0].cluster.intra_node
    for each in (link, link.ring):
        sizes, seconds = zip(*each.measured, strict=True)
        assert list(sizes) == sorted(sizes)
        assert list(seconds) == sorted(seconds)
        assert each.traveling_s(sizes[-1]) == pytest.approx(seconds[-1], rel=1e-12)  # interpolated


def measured_links(rank: int, world_size: int) -> Bench:
    with mock.patch.multiple(measured, _NUMEL={"cpu": 1 << 14}, _LINK_S=0.02):
        return measured.measure(["loco"], CPU)


@pytest.mark.slow
def test_ranks_find_a_collective_equally_slow_and_between_far_ones_its_fastest_call_counts() -> None:
    costs = run_ranks(costs_near_and_far, 2, timeout=60)
    assert costs[0] == costs[1]
    near, far = costs[0]
    assert far < 0.5 * near


def costs_near_and_far(rank: int, world_size: int) -> list[float]:
    """One call of three is fast, and in the others one rank waits for the other."""
    costs = []
    for far in (False, True):
        comm, calls = GroupComm(), itertools.count()
        comm.is_far = far  # type: ignore[misc]

        def call(calls: Iterator[int] = calls) -> None:
            at = next(calls) % 3
            time.sleep(0.01 if at == 2 else 0.2 if at == rank else 0.0)
            dist.all_reduce(torch.zeros(1))

        costs.append(measured.calls_of(Ranks.flat(comm), comm, call, CPU)[0])
    return costs


@pytest.mark.slow
def test_ranks_of_a_node_begin_every_message_together() -> None:
    """Though one of them needs longer for each: one after the other, each would have their link to itself."""
    first, second = run_ranks(calls_begin, 2, timeout=60)
    apart = [abs(a - b) for a, b in zip(first, second, strict=True)][-3:]  # those that are timed
    assert len(apart) == 3
    assert statistics.median(apart) < 0.1  # one after the other they are 0.1 s further apart with each


def calls_begin(rank: int, world_size: int) -> list[float]:
    begun: list[float] = []

    def call() -> None:
        begun.append(time.monotonic())
        time.sleep(0.1 * rank)

    measured.calls_of(Ranks(GroupComm(), LocalComm(), GroupComm()), LocalComm(), call, CPU)
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
    comm.is_far = far  # type: ignore[misc]

    def call() -> None:
        nonlocal times
        times += 1
        time.sleep(0.15 if rank % 2 else 0.015)
        comm.all_reduce(torch.zeros(1)).wait()

    measured.calls_of(Ranks(GroupComm(), comm, GroupComm(near)), comm, call, CPU)
    return times
