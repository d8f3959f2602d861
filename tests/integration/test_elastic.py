"""Replicas that come and go: real processes, a real lighthouse, faults at every moment of a turn."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import DiLoCo, Elastic
from lowbit_strategy.attach.ddp import attach_replica
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, attach_fsdp, prepare
from lowbit_strategy.elastic.membership import Membership

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from testing.processes.ranks import free_port, run_ranks
from testing.processes.replicas import Replicas
from testing.processes.scenarios import raised
from testing.processes.scripts import REPOSITORY
from testing.training.elastic import EVERY, Taught, TrainedReplica, train, train_without
from testing.training.meshes import LOCO, net, tensor_parallel


def turns_taken(folder: Path, name: str) -> int:
    path = folder / f"{name}.turns"
    return len(path.read_text().splitlines()) if path.exists() else 0


def check_agreement(results: dict[str, TrainedReplica]) -> None:
    """Whoever has the same history has the same anchors, and all end with the same."""
    digests: dict[int, int] = {}
    for result in results.values():
        for turn in result.turns:
            assert digests.setdefault(turn.history, turn.digest) == turn.digest
    assert len({result.digest for result in results.values()}) == 1


@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_members_that_stay_are_ranks_that_stay(tmp_path: Path, fragments: int) -> None:
    rule = DiLoCo(every=EVERY, momentum=0.5, fragments=fragments)
    with Replicas(tmp_path, min_replicas=3) as run:
        for name in "abc":
            run.start(name, train, tmp_path, 22, 0.0, rule=rule)
        without = run_ranks(train_without, 3, 22, rule)
        results = run.results(*"abc")
    check_agreement(results)
    for rank, name in enumerate("abc"):
        assert results[name].losses == without[rank].losses
        assert results[name].sent == without[rank].sent
        assert all(map(torch.equal, results[name].weights, without[rank].weights))


MOMENTS = ("before", "exchange", "received", "confirming", "committed")


@pytest.mark.parametrize(
    ("lost", "moment"),
    [
        ("b", "exchange"),
        *(pytest.param(name, moment, marks=pytest.mark.slow) for moment in MOMENTS for name in "ab"),
    ],
)
def test_one_that_is_killed_is_lost_and_the_others_go_on(tmp_path: Path, moment: str, lost: str) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, train, tmp_path, 24, 0.02, (moment, 2) if name == lost else None, start_with=3)
        others = [name for name in "abc" if name != lost]
        results = run.results(*others)
        assert run.processes[lost].exitcode == -signal.SIGKILL
    check_agreement(results)
    for result in results.values():
        assert result.turns[-1].members == others
        assert result.steps == 24


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["connecting", "helping", "healing"])
def test_one_that_is_killed_while_another_comes(tmp_path: Path, moment: str) -> None:
    lost = "d" if moment == "healing" else "a"
    with Replicas(tmp_path) as run:
        for name in "abcd":
            fault = (moment, 0 if lost == "d" else 2) if name == lost else None
            until = "d.struck" if lost == "d" else "d.turns"
            run.start(name, train, tmp_path, 24, 0.03, fault, held=True, until=until)
        run.release(*"abc")
        run.wait_for(lambda: turns_taken(tmp_path, "b") >= 2, "two turns")
        run.release("d")
        others = [name for name in "abcd" if name != lost]
        results = run.results(*others)
        assert run.processes[lost].exitcode == -signal.SIGKILL
    check_agreement(results)
    for result in results.values():
        assert result.turns[-1].members == others


@pytest.mark.slow
def test_two_that_are_killed_at_once(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abcd":
            fault = {"a": ("exchange", 2), "c": ("confirming", 2)}.get(name)
            run.start(name, train, tmp_path, 24, 0.02, fault, start_with=4)
        results = run.results("b", "d")
    check_agreement(results)
    assert results["b"].turns[-1].members == ["b", "d"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["exchange", *(pytest.param(moment, marks=pytest.mark.slow) for moment in ("before", "confirming"))]
)
def test_one_that_has_stopped_for_a_while_joins_again(tmp_path: Path, moment: str) -> None:
    """It is lost, as if it had been killed. When it goes on it notices, gets the others' state and is there again."""
    with Replicas(tmp_path) as run:
        for name in "abc":
            fault = (moment, 2) if name == "b" else None
            run.start(name, train, tmp_path, 24, 0.03, fault, "stop", held=True, until="b.healed", start_with=3)
        run.release(*"abc")
        run.wait_for((tmp_path / "b.struck").exists, "b has stopped")
        seen = turns_taken(tmp_path, "a")
        run.wait_for(lambda: turns_taken(tmp_path, "a") >= seen + 2, "the others have gone on")
        run.send("b", signal.SIGCONT)
        results = run.results(*"abc")
    check_agreement(results)
    assert any(turn.members == ["a", "c"] for turn in results["a"].turns)
    assert (tmp_path / "b.healed").exists()
    assert results["a"].turns[-1].members == ["a", "b", "c"]


@pytest.mark.slow
def test_a_lighthouse_that_is_lost_can_be_started_again(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, train, tmp_path, 24, 0.03, held=True, until="started again")
        run.release("a", "b")
        run.wait_for(lambda: turns_taken(tmp_path, "a") >= 3, "three turns")
        run.darken()
        run.wait_for(lambda: "does not answer" in (tmp_path / "a.output").read_text(), "a says what is missing")
        run.light()
        (tmp_path / "started again").touch()
        results = run.results("a", "b")
    check_agreement(results)
    assert results["a"].steps >= 24


@pytest.mark.slow
def test_one_that_does_not_fit_is_refused_and_the_others_do_not_notice(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            options = {"facts": {"model": "larger"}} if name == "c" else {}
            run.start(name, train, tmp_path, 24, 0.03, held=True, until="c.error", **options)
        run.release("a", "b")
        run.wait_for(lambda: turns_taken(tmp_path, "a") >= 2, "two turns")
        run.release("c")
        error = run.error("c")
        results = run.results("a", "b")
    assert "this replica, c, is not compatible" in error
    assert "model: larger instead of small" in error
    check_agreement(results)
    assert all(turn.members == ["a", "b"] for turn in results["a"].turns)
    assert results["a"].healed == 0


@pytest.mark.slow
def test_rounds_of_seconds_count_what_each_has_trained(tmp_path: Path) -> None:
    rule = DiLoCo(every="0.5s", momentum=0.5)
    with Replicas(tmp_path) as run:
        for name, pause in {"a": 0.01, "b": 0.05}.items():
            run.start(name, train, tmp_path, 100, pause, start_with=2, rule=rule)
        results = run.results("a", "b")
    check_agreement(results)
    faster, slower = results["a"], results["b"]
    assert len(faster.losses) > len(slower.losses)
    weights = [turn.weights for turn in faster.turns]
    assert weights == [turn.weights for turn in slower.turns]
    assert all(sum(each) == pytest.approx(2) for each in weights)
    assert any(first > second for first, second in weights)


@pytest.mark.slow
def test_a_sequence_of_losses_and_joins_gives_the_same_bits_twice(tmp_path: Path) -> None:
    def once(folder: Path) -> dict[str, TrainedReplica]:
        with Replicas(folder) as run:
            for name in "abc":
                run.start(name, train, folder, 32, 0.02, ("exchange", 3) if name == "c" else None, start_with=3)
            return run.results("a", "b")

    first, second = once(tmp_path / "1"), once(tmp_path / "2")
    assert [turn.digest for turn in first["a"].turns] == [turn.digest for turn in second["a"].turns]


@pytest.mark.slow
def test_one_that_comes_later_gets_what_the_others_share(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, train, tmp_path, 40, 0.03, held=True, until="c.turns")
        run.release("a", "b")
        run.wait_for(lambda: turns_taken(tmp_path, "a") >= 3, "three turns")
        run.release("c")
        results = run.results(*"abc")
    check_agreement(results)
    assert results["c"].healed == 1
    assert results["c"].turns[-1].members == ["a", "b", "c"]
    assert len(results["c"].losses) < len(results["a"].losses)


@pytest.mark.slow
def test_frozen_parameters_are_the_others_or_averaged(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for fixed, name in enumerate("abc"):
            model = Taught(float(fixed))
            run.start(name, train, tmp_path, 24, 0.03, held=True, until="c.turns", model=model)
        run.release("a", "b")
        run.wait_for(lambda: turns_taken(tmp_path, "a") >= 3, "three turns")
        run.release("c")
        results = run.results(*"abc")
    check_agreement(results)
    first, *others = (results[name].weights for name in "abc")
    assert all(torch.equal(own, same) for weights in others for own, same in zip(weights, first, strict=True))
    teacher, fixed = first[:2]
    assert teacher.any()
    assert not fixed.any()  # of the first replica


@pytest.mark.slow
def test_the_command_is_a_lighthouse_until_it_is_interrupted(tmp_path: Path) -> None:
    port = free_port()
    code = "from lowbit_strategy.cli import main; main()"
    command = [sys.executable, "-c", code, "lighthouse", "--bind", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout is not None
            assert f":{port}" in process.stdout.readline()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30) as page:
                assert page.status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def closed_at_once(elastic: Elastic) -> bool:
    """The model is used further, without compression."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = net()
    session = attach_replica(model, prepare(model, LOCO, SyncOptions(outer=DiLoCo(every=5), elastic=elastic)))
    session.close()
    model(torch.randn(8, 32)).sum().backward()
    joined: bool = session.replica.has_joined
    return joined


def test_a_session_that_is_closed_before_training_does_not_join(tmp_path: Path) -> None:
    with Replicas(tmp_path, min_replicas=1) as run:
        run.start("a", closed_at_once)
        assert run.results("a") == {"a": False}


def test_a_lighthouse_that_is_not_there_is_an_error_that_says_so() -> None:
    with pytest.raises(ConnectionError, match="start one with lowbit lighthouse"):
        Membership(Elastic(lighthouse=f"http://127.0.0.1:{free_port()}", connect_timeout=2.0), {})


def test_tensor_parallelism_inside_a_replica_is_refused() -> None:
    for error in [error for errors in run_ranks(_refused_in_parts, 2) for error in errors]:
        assert error.startswith("ValueError: elastic supports")
        assert "without tensor parallelism" in error


def _refused_in_parts(rank: int, world_size: int) -> list[str]:
    """Under DDP, whose group has one rank, and under HSDP with one replica."""
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "shard", "tp"))
    one, other = net(), net()
    for each in (one, other):
        tensor_parallel(each, mesh["tp"])
    given = {"outer": DiLoCo(every=5), "elastic": Elastic(lighthouse="http://127.0.0.1:1")}
    group = mesh["dp"].get_group()
    replicated = DistributedDataParallel(one, device_mesh=mesh["dp"])
    in_ddp = prepare(one, LOCO, SyncOptions(**given), group=group)
    fully_shard(other, mesh=mesh["dp", "shard"])
    sharded = prepare(other, LOCO, SyncOptions(**given, shard_size=1), scatter=True, group=group)
    return [raised(lambda: attach_ddp(replicated, in_ddp)), raised(lambda: attach_fsdp(other, sharded))]
