"""Replicas whose network is cut for a while, who never train on apart as if they were one run; replicas in homes."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from testing.hosts.homes import AT_HOME, Homes
from testing.hosts.namespaces import SlowNetwork
from testing.processes.replicas import Replicas
from testing.training.elastic import TrainedReplica, Turn, train

pytestmark = [pytest.mark.slow, pytest.mark.root]
CUT_S = 20.0


def trained_through(folder: Path, first: int, second: int | None) -> tuple[float, float, dict[str, TrainedReplica]]:
    """Three replicas, hosts 1 to 3 behind the lighthouse's, train before, while and after the network is cut: when it
    was cut and mended, and what they have come to.
    """
    with SlowNetwork(4) as network, Replicas(folder, timeout=180, network=network) as run:
        for name in "abc":
            run.start(name, train, folder, 1, 0.02, until="stop", start_with=3)
        turns = {name: folder / f"{name}.turns" for name in "abc"}
        run.wait_for(lambda: all(lines(path) >= 3 for path in turns.values()), "all take part", 120)
        network.cut(first, second)
        cut = time.time()
        time.sleep(CUT_S)
        network.mend(first, second)
        mended, before = time.time(), {name: lines(path) for name, path in turns.items()}
        run.wait_for(lambda: all(lines(path) >= before[name] + 5 for name, path in turns.items()), "all go on", 120)
        (folder / "stop").touch()
        return cut, mended, run.results(*"abc")


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def check(results: dict[str, TrainedReplica], last: str = "abc") -> None:
    """Who has the same history has the same anchors, no turn was taken twice, and all end together."""
    digests: dict[int, int] = {}
    by_number: dict[int, int] = {}
    for result in results.values():
        for turn in result.turns:
            assert digests.setdefault(turn.history, turn.digest) == turn.digest
            assert by_number.setdefault(turn.turn, turn.history) == turn.history  # two runs would count the same
        assert result.turns[-1].members == list(last)
    assert len({result.digest for result in results.values()}) == 1


def within(turns: list[Turn], begun: float, ended: float) -> list[Turn]:
    return [turn for turn in turns if begun < turn.time < ended]


def test_a_host_that_is_cut_off_waits_and_heals(tmp_path: Path) -> None:
    cut, mended, results = trained_through(tmp_path, 3, None)
    check(results)
    assert not within(results["c"].turns, cut + 1.0, mended)
    for name in "ab":
        assert within(results[name].turns, cut + 8.0, mended)[-1].members == ["a", "b"]
    assert results["c"].healed == results["b"].healed + 1


def test_two_that_cannot_reach_each_other_do_not_part(tmp_path: Path) -> None:
    """Both reach the lighthouse and the third one."""
    cut, mended, results = trained_through(tmp_path, 2, 3)
    check(results)
    for result in results.values():
        assert not within(result.turns, cut + 1.0, mended)
        assert within(result.turns, mended, math.inf)


def test_replicas_in_homes_meet_in_a_private_network(tmp_path: Path) -> None:
    """Behind routers that translate addresses; one is killed, and one comes from a home of its own."""
    with Homes(4) as network, Replicas(tmp_path, timeout=120, network=network) as run:
        assert not network.reaches(network.hosts[1], network.outside(2))
        assert not network.reaches(network.hosts[0], AT_HOME)
        assert network.reaches(network.hosts[1], network.hosts[2].address)
        turns = {name: tmp_path / f"{name}.turns" for name in "abcd"}
        for name in "abc":
            run.start(name, train, tmp_path, 1, 0.02, until="stop", start_with=3)
        run.wait_for(lambda: lines(turns["c"]) >= 3, "all take part", 60)
        run.send("c", signal.SIGKILL)
        run.start("d", train, tmp_path, 1, 0.02, until="stop")
        run.wait_for(lambda: lines(turns["d"]) >= 5, "d takes part", 60)
        (tmp_path / "stop").touch()
        results = run.results(*"abd")
    check(results, "abd")
    assert results["d"].healed == 1
