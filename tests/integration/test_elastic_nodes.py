"""Replicas of several ranks that share one model, each a Lightning its own run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.fabric import LowBitFSDPStrategy as LowBitFabricFSDPStrategy
from lowbit_strategy.lightning import CompressionMonitor, LowBitFSDPStrategy
from testing.processes.ranks import run_ranks
from testing.processes.replicas import Replicas, ranks_of
from testing.record import read_record
from testing.training.comparing import fingerprint, outcome
from testing.training.elastic import AfterTurns, arm
from testing.training.regression import MIN_SHARD_NUMEL, ByStep, Regression, dataset, mlp, trainer

RULE = DiLoCo(every=5, momentum=0.5)
NUM_RANKS = 2


def strategy(elastic: Elastic | None, **options: Any) -> LowBitFSDPStrategy:
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None)
    given: dict[str, Any] = {"shard_size": NUM_RANKS, "outer": RULE, "min_shard_numel": MIN_SHARD_NUMEL}
    return LowBitFSDPStrategy(compressor, elastic=elastic, **(given | options))


class ByPlace(ByStep):
    """Its data depends on the step and on the rank's place among all, as if replicas were in one world."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.place = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        at = (self.global_step * 2 * NUM_RANKS + self.place) * 4 % 96
        return Regression.training_step(self, dataset()[at : at + 4], batch_idx)


def fit(elastic: Elastic | None, first_rank: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0 if elastic is None else first_rank)
    model = ByPlace(first_rank + int(os.environ["RANK"]))
    made = trainer(strategy(elastic), max_steps=steps)
    made.fit(model, DataLoader(dataset(), batch_size=4))
    return outcome(made, model)


def fit_as_rank(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    return fit(None, 0, steps)


@pytest.mark.slow
def test_nodes_that_stay_train_as_nodes_of_one_world(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", fit, 0, 22, num_ranks=NUM_RANKS)
        run.start("b", fit, NUM_RANKS, 22, num_ranks=NUM_RANKS)
        names = [*ranks_of("a", NUM_RANKS), *ranks_of("b", NUM_RANKS)]
        replicas = run.results(*names)
    without = run_ranks(fit_as_rank, 2 * NUM_RANKS, 22, process_group=None)
    assert [replicas[name] for name in names] == without
    assert replicas["a"]["compressor"] == "LoCo"


def fit_in_fabric(elastic: Elastic, seed: int) -> dict[str, Any]:
    """Nothing but Fabric's own calls; replicas begin with weights that differ, and meet in the first forward pass."""
    torch.manual_seed(seed)
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None)
    options: dict[str, Any] = {"outer": RULE, "elastic": elastic, "min_shard_numel": MIN_SHARD_NUMEL}
    made = LowBitFabricFSDPStrategy(compressor, shard_size="node", **options)
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy=made)
    fabric.launch()
    net = mlp()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    assert made.sessions[0].replica is not None
    losses = []
    for step in range(15):
        at = 8 * step % 96 + 4 * fabric.global_rank
        x, y = dataset()[at : at + 4]
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"print": fingerprint(net), "losses": losses, "members": made.sessions[0].replica.members}


@pytest.mark.slow
def test_fabric_s_nodes_meet_before_the_first_forward_pass(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for seed, name in enumerate("ab"):
            run.start(name, fit_in_fabric, seed, num_ranks=NUM_RANKS)
        results = run.results(*nodes("ab"))
    assert len({result["print"] for result in results.values()}) == 1  # at the end of a round
    assert {result["members"] for result in results.values()} == {("a", "b")}
    torch.manual_seed(0)
    x, y = dataset()[:4]
    first = F.mse_loss(mlp()(x), y).item()
    assert results["a"]["losses"][0] == pytest.approx(first)
    assert results["b"]["losses"][0] == pytest.approx(first)  # with the other one's weights


class Watched(Callback):
    """What a rank sees of the turns, and when it dies.

    Args:
        folder: Where the ranks leave what others wait for.
        key: Of this rank.
        start_with: Replicas that there must be at the beginning.
        fault: A moment of a turn and how many turns have been before it, or "step" and the number of one.
        stops: It does not die, and only stops.
    """

    def __init__(self, folder: Path, key: str, start_with: int, fault: tuple[str, int] | None, *, stops: bool) -> None:
        self.end = signal.SIGSTOP if stops else signal.SIGKILL
        self.path = folder / f"{key}.turns"
        self.steps = folder / f"{key}.steps"
        self.turns: list[dict[str, Any]] = []
        self.start_with, self.fault = start_with, fault

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.outer = trainer.strategy.session.replica
        self.membership = self.outer.membership
        self.options = self.membership.options
        self.membership.options = dataclasses.replace(self.options, min_replicas=self.start_with)
        AfterTurns(self.outer.sync, self.note)
        if self.fault is not None and self.fault[0] != "step":
            seen = SimpleNamespace(outer=self.outer, membership=self.membership, turns=self.turns, log=self.path)
            arm(seen, *self.fault, end=self.strike)

    def note(self) -> None:
        facts = {"members": list(self.outer.members), "weights": list(self.outer.weights)}
        self.turns.append(facts | {"history": self.outer.standing.history, "digest": self.outer._digest()})

    def on_train_batch_start(self, *_: Any) -> None:
        self.membership.options = self.options

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.write_text(str(trainer.global_step))
        time.sleep(0.03)
        if self.fault == ("step", trainer.global_step):
            self.strike()

    def strike(self) -> None:
        os.kill(os.getpid(), self.end)


class Indexed(Regression):
    """It keeps the indices of its samples."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, index = batch
        self.seen += index.tolist()
        return super().training_step((x, y), batch_idx)


def indexed() -> TensorDataset:
    x, y = dataset(4800).tensors
    return TensorDataset(x, y, torch.arange(4800))


def fit_and_watch(
    elastic: Elastic,
    folder: Path,
    steps: int = 30,
    start_with: int = 2,
    fault: tuple[str, int] | None = None,
    at_rank: int = NUM_RANKS - 1,
    stops: bool = False,
    checkpoint: Path | None = None,
    saves: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train. `fault`: of one rank, which dies or `stops`. `saves`: every ten steps. `options` are of the strategy."""
    assert elastic.name is not None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(ord(elastic.name))
    rank = int(os.environ["RANK"])
    key = ranks_of(elastic.name, NUM_RANKS)[rank]
    watched = Watched(folder, key, start_with, fault if rank == at_rank else None, stops=stops)
    model = Indexed(optimizer="adam")
    record = folder / "records" / elastic.name
    callbacks: list[Callback] = [watched, CompressionMonitor(every_n_steps=5, record=record)]
    if saves:
        callbacks.append(
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=10, save_top_k=-1, filename="{step}")
        )
    given: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "enable_checkpointing": saves}
    made = trainer(strategy(elastic, **options), callbacks=callbacks, **given)
    with contextlib.suppress(SIGTERMException):
        made.fit(model, DataLoader(indexed(), batch_size=4, shuffle=True), ckpt_path=checkpoint)
    return {
        "print": fingerprint(model),
        "turns": watched.turns,
        "seen": model.seen,
        "losses": model.losses,
        "steps": made.global_step,
        "healed": watched.outer.num_heals,
    }


def steps_of(folder: Path, key: str) -> int:
    path = folder / f"{key}.steps"
    return int(path.read_text() or 0) if path.exists() else 0


def nodes(names: str) -> list[str]:
    return [key for name in names for key in ranks_of(name, NUM_RANKS)]


def check_agreement(results: dict[str, Any]) -> None:
    """Ranks of the same index that have the same history have the same anchors; all end with the same model."""
    digests: dict[tuple[bool, int], int] = {}
    for key, result in results.items():
        for turn in result["turns"]:
            assert digests.setdefault((len(key) > 1, turn["history"]), turn["digest"]) == turn["digest"]
    assert len({result["print"] for result in results.values()}) == 1


MOMENTS = [("step", 12), ("exchange", 2), ("confirming", 2), ("before", 2), ("received", 2), ("committed", 2)]


@pytest.mark.parametrize(
    ("fault", "at_rank"),
    [
        (("exchange", 2), 1),
        *(pytest.param(fault, rank, marks=pytest.mark.slow) for fault in MOMENTS for rank in (0, 1)),
    ],
)
def test_a_node_is_lost_with_one_of_its_ranks_and_the_others_go_on(
    tmp_path: Path, fault: tuple[str, int], at_rank: int
) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            options = {"fault": fault if name == "b" else None, "at_rank": at_rank}
            run.start(name, fit_and_watch, tmp_path, start_with=3, num_ranks=NUM_RANKS, **options)
        results = run.results(*nodes("ac"))
        killed, other = nodes("b")[at_rank], nodes("b")[1 - at_rank]
        assert "LostRankError" in run.error(other) or "Connection" in run.error(other)
        assert run.processes[killed].exitcode == -signal.SIGKILL
    check_agreement(results)
    for key, result in results.items():
        assert result["turns"][0]["members"] == ["a", "b", "c"]
        assert result["turns"][-1]["members"] == ["a", "c"]
        assert result["steps"] == 30
        assert result["healed"] == int(key[0] == "c")  # at the beginning, when all get the first one's weights
    lines = read_record(tmp_path / "records" / "a")
    changes = [(line["joined"], line["lost"]) for line in lines if line["kind"] == "members"]
    assert changes == [(["a", "b", "c"], []), ([], ["b"])]
    assert sum(line["kind"] == "observation" for line in lines) >= 4


@pytest.mark.slow
def test_a_node_of_which_one_rank_has_stopped_for_a_while_joins_again(tmp_path: Path) -> None:
    """The others go on once they have waited for it as long as the lighthouse does, in every round."""
    with Replicas(tmp_path, timeout=240) as run:
        for name in "abc":
            given: dict[str, Any] = {"start_with": 3, "num_ranks": NUM_RANKS, "stops": True}
            run.start(name, fit_and_watch, tmp_path, 60, fault=("exchange", 2) if name == "b" else None, **given)
        run.wait_for((tmp_path / "b1.struck").exists, "b has stopped", 120)
        seen = steps_of(tmp_path, "a")
        run.wait_for(lambda: steps_of(tmp_path, "a") >= seen + 6, "the others have gone on")
        run.send("b1", signal.SIGCONT)
        results = run.results(*nodes("abc"))
    check_agreement(results)
    assert any(turn["members"] == ["a", "c"] for turn in results["a"]["turns"])
    assert results["a"]["turns"][-1]["members"] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_node_of_which_one_rank_is_terminated_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, fit_and_watch, tmp_path, 40, start_with=3, num_ranks=NUM_RANKS)
        run.wait_for(lambda: steps_of(tmp_path, "b") >= 9, "nine steps", 120)
        run.send("b1", signal.SIGTERM)
        results = run.results(*nodes("abc"))
    left = [results.pop(key)["steps"] for key in nodes("b")]
    assert left[0] == left[1] < 40
    check_agreement(results)
    assert all(result["steps"] == 40 for result in results.values())
    assert results["a"]["turns"][-1]["members"] == ["a", "c"]


@pytest.mark.slow
def test_a_node_that_comes_later_gets_what_the_others_share(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, fit_and_watch, tmp_path, 50, num_ranks=NUM_RANKS, held=True)
        run.release(*nodes("ab"))
        run.wait_for(lambda: steps_of(tmp_path, "b1") >= 9, "nine steps")
        run.release(*nodes("c"))
        results = run.results(*nodes("abc"))
    check_agreement(results)
    for key in nodes("c"):
        assert results[key]["healed"] == 1
        assert results[key]["steps"] == 50
        assert len(results[key]["losses"]) < 50
        turns = [turn["weights"] for turn in results["a"]["turns"] if turn["members"] == ["a", "b", "c"]]
        assert turns[0] == [1.5, 1.5, 0.0]  # it has nothing to give yet
        assert turns[1] == [1.0, 1.0, 1.0]
    together = [set(result["seen"][-4 * len(results["c"]["losses"]) :]) for result in results.values()]
    assert len(set().union(*together)) == sum(map(len, together))


@pytest.mark.parametrize("moment", ["connecting", "helping", "healing"])
@pytest.mark.parametrize("at_rank", [0, 1])
@pytest.mark.slow
def test_a_node_is_lost_while_another_comes(tmp_path: Path, moment: str, at_rank: int) -> None:
    lost = "d" if moment == "healing" else "a"
    with Replicas(tmp_path) as run:
        for name in "abcd":
            fault = (moment, 0 if lost == "d" else 2) if name == lost else None
            given: dict[str, Any] = {"start_with": 2, "fault": fault, "at_rank": at_rank, "num_ranks": NUM_RANKS}
            run.start(name, fit_and_watch, tmp_path, 60, held=True, **given)
        run.release(*nodes("abc"))
        run.wait_for(lambda: steps_of(tmp_path, "b") >= 12, "two turns")
        run.release(*nodes("d"))
        others = [name for name in "abcd" if name != lost]
        results = run.results(*nodes("".join(others)))
        assert run.processes[nodes(lost)[at_rank]].exitcode == -signal.SIGKILL
    check_agreement(results)
    for result in results.values():
        assert result["turns"][-1]["members"] == others


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_nodes_that_have_all_been_lost_resume_from_the_lowest_ones_checkpoint(
    tmp_path: Path, distributed: bool
) -> None:
    options: dict[str, Any] = {"num_ranks": NUM_RANKS, "save_distributed_checkpoint": distributed}
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, fit_and_watch, tmp_path, 30, saves=True, **options)
        whole = run.results(*nodes("ab"))
    with Replicas(tmp_path) as run:
        for name in "ab":
            saved = tmp_path / "checkpoints" / "step=20.ckpt"
            run.start(name, fit_and_watch, tmp_path, 30, checkpoint=saved, **options)
        results = run.results(*nodes("ab"))
    check_agreement(results)
    for key, result in results.items():
        assert result["healed"] == 0
        assert len(result["losses"]) == 10
        assert result["seen"] == whole[key]["seen"][-40:]


@pytest.mark.slow
def test_rounds_of_seconds_are_decided_once_per_node(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "ab":
            rule = DiLoCo(every="0.3s", momentum=0.5)
            run.start(name, fit_and_watch, tmp_path, 40, outer=rule, num_ranks=NUM_RANKS)
        results = run.results(*nodes("ab"))
    check_agreement(results)
    assert results["a"]["losses"] != results["a1"]["losses"]
    for name in "ab":
        assert len({len(results[key]["turns"]) for key in ranks_of(name, NUM_RANKS)}) == 1
    assert len(results["a"]["turns"]) >= 3


@pytest.mark.slow
def test_a_node_of_another_size_is_refused_and_the_others_do_not_notice(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, fit_and_watch, tmp_path, num_ranks=NUM_RANKS, held=True, shard_size="node")
        run.start("c", fit_of_any_size, num_ranks=3, held=True)
        run.release(*nodes("ab"))
        run.wait_for(lambda: steps_of(tmp_path, "a") >= 6, "a turn")
        run.release(*ranks_of("c", 3))
        errors = [run.error(key) for key in ranks_of("c", 3)]
        results = run.results(*nodes("ab"))
    for error in errors:
        assert "this replica, c, is not compatible" in error
        assert "shard_size: 3 instead of 2" in error
    check_agreement(results)
    assert all(turn["members"] == ["a", "b"] for turn in results["a"]["turns"])


def test_a_run_whose_ranks_have_several_models_is_refused() -> None:
    errors = run_ranks(_refused, 2, process_group=None)
    assert all("that share one model by FSDP2 only, but this one has 2 ranks" in error for error in errors)


def _refused(rank: int, world_size: int) -> str:
    elastic = Elastic(lighthouse="http://127.0.0.1:1")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        trainer(strategy(elastic, shard_size=1)).fit(Regression(), DataLoader(dataset()))
    return str(error.value)


def fit_of_any_size(elastic: Elastic) -> None:
    trainer(strategy(elastic, shard_size="node"), max_steps=5).fit(Regression(), DataLoader(dataset(), batch_size=4))
