"""Replicas that come and go under Lightning's Trainer, each with its own world."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo, OverlapLocalSGD
from lowbit_strategy.lightning import CompressionMonitor, LowBitDDPStrategy
from testing.processes.ranks import run_ranks
from testing.processes.replicas import Replicas
from testing.record import read_record
from testing.training.comparing import fingerprint, outcome
from testing.training.regression import ByStep, Regression, dataset, trainer

RULE = DiLoCo(every=5, momentum=0.5)


def strategy(elastic: Elastic | None) -> LowBitDDPStrategy:
    return LowBitDDPStrategy(LoCo(block_size=32, beta=0.0, reset_steps=None), outer=RULE, elastic=elastic)


class ByName(ByStep):
    """Its data depends on the step and on the replica, as if replicas were ranks of one world."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.number = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        at = (self.global_step * 2 + self.number) * 4 % 96
        return Regression.training_step(self, dataset()[at : at + 4], batch_idx)


def fit(elastic: Elastic | None, rank: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0 if elastic is None else rank)
    model = ByName(rank)
    made = trainer(strategy(elastic), max_steps=steps)
    made.fit(model, DataLoader(dataset(), batch_size=4))
    return outcome(made, model)


def fit_as_rank(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    return fit(None, rank, steps)


@pytest.mark.slow
def test_members_that_stay_train_as_ranks_of_one_world(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", fit, 0, 22)
        run.start("b", fit, 1, 22)
        without = run_ranks(fit_as_rank, 2, 22, process_group=None)
        replicas = run.results("a", "b")
    assert [replicas["a"], replicas["b"]] == without
    assert replicas["a"]["compressor"] == "LoCo"


class StepsOnDisk(Callback):
    """What a replica sees of the steps, and who dies when."""

    def __init__(self, dies_at: int | None, folder: Path, name: str) -> None:
        self.dies_at = dies_at
        self.path = folder / f"{name}.steps"
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        self.path.write_text(str(trainer.global_step))
        time.sleep(0.03)
        if trainer.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Scheduled(Regression):
    """It keeps the indices of its samples, and its learning rate falls by steps."""

    def __init__(self) -> None:
        super().__init__(optimizer="plain", lr=0.1)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, index = batch
        self.seen += index.tolist()
        return super().training_step((x, y), batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def indexed() -> torch.utils.data.TensorDataset:
    x, y = dataset(960).tensors
    return torch.utils.data.TensorDataset(x, y, torch.arange(960))


def fit_and_save(elastic: Elastic, folder: Path, dies_at: int | None) -> dict[str, Any]:
    assert elastic.name is not None
    torch.manual_seed(ord(elastic.name))
    noted = StepsOnDisk(dies_at, folder, elastic.name)
    saver = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=10, save_top_k=-1, filename="{step}")
    monitor = CompressionMonitor(every_n_steps=10, record=folder / "records" / elastic.name)
    callbacks = [noted, saver, monitor]
    made = trainer(strategy(elastic), max_steps=50, max_epochs=-1, callbacks=callbacks, enable_checkpointing=True)
    model = Scheduled()
    made.fit(model, DataLoader(indexed(), batch_size=4, shuffle=True))
    rate = made.optimizers[0].param_groups[0]["lr"]
    return {"print": fingerprint(model), "steps": noted.steps, "seen": model.seen, "rate": rate}


def step_of(folder: Path, name: str) -> int:
    path = folder / f"{name}.steps"
    return int(path.read_text() or 0) if path.exists() else 0


class Change(NamedTuple):
    joined: list[str]
    lost: list[str]
    members: list[str]


def changes_of(folder: Path, name: str) -> list[Change]:
    lines = [line for line in read_record(folder / "records" / name) if line["kind"] == "members"]
    return [Change(line["joined"], line["lost"], line["members"]) for line in lines]


def test_one_is_lost_and_another_comes_into_the_others_step(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, fit_and_save, tmp_path, 12 if name == "b" else None, held=True)
        run.release("a", "b")
        run.wait_for(lambda: step_of(tmp_path, "b") >= 9, "nine steps")
        run.release("c")
        results = run.results("a", "c")
    a, c = results["a"], results["c"]
    assert a["print"] == c["print"]
    assert a["steps"][-1] == c["steps"][-1] == 50
    assert c["steps"][0] > 9  # and not 1
    assert a["rate"] == pytest.approx(c["rate"]) == pytest.approx(0.1 * 0.99**50)
    together = c["steps"][0]
    assert not set(a["seen"][4 * together :]) & set(c["seen"])
    saved = torch.load(tmp_path / "checkpoints" / "step=40.ckpt", weights_only=True)
    assert saved["global_step"] == 40
    lines = read_record(tmp_path / "records" / "a")
    assert sum(line["kind"] == "observation" for line in lines) >= 3
    first, *changes = changes_of(tmp_path, "a")
    assert first.joined == first.members
    assert sorted(changes) in (
        [Change([], ["b"], ["a"]), Change(["c"], [], ["a", "c"])],
        [Change(["c"], ["b"], ["a", "c"])],
        [Change([], ["b"], ["a", "c"]), Change(["c"], [], ["a", "b", "c"])],
    )
    assert changes_of(tmp_path, "c")[-1].members == changes[-1].members


def fit_until_terminated(elastic: Elastic, folder: Path) -> dict[str, Any]:
    assert elastic.name is not None
    made = trainer(strategy(elastic), max_steps=50, max_epochs=-1, callbacks=[StepsOnDisk(None, folder, elastic.name)])
    model = Scheduled()
    with contextlib.suppress(SIGTERMException):
        made.fit(model, DataLoader(indexed(), batch_size=4))
    return {"steps": made.global_step, "print": fingerprint(model)}


@pytest.mark.slow
def test_one_that_is_terminated_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, fit_until_terminated, tmp_path, held=True)
        run.release(*"abc")
        run.wait_for(lambda: step_of(tmp_path, "b") >= 9, "nine steps")
        run.send("b", signal.SIGTERM)
        results = run.results(*"abc")
    assert results["b"]["steps"] < 50
    assert results["a"] == results["c"]
    assert results["a"]["steps"] == 50


class Terminating(Scheduled):
    """Gets SIGTERM in a step after which it meets the others, and the others are lost before."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == RULE.every - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fit_while_others_are_missing(elastic: Elastic, folder: Path, *, terminates: bool = False) -> dict[str, Any]:
    """Ends with the status that the framework's exception gives, within seconds of the signal."""
    assert elastic.name is not None
    made = trainer(strategy(elastic), max_steps=50, max_epochs=-1)
    with pytest.raises(SIGTERMException) as ended:
        made.fit(Terminating() if terminates else Scheduled(), DataLoader(indexed(), batch_size=4))
    return {"steps": made.global_step, "status": ended.value.code}


@pytest.mark.slow
def test_one_that_waits_answers_sigterm(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", fit_while_others_are_missing, tmp_path, patience=1000.0)
        run.wait_for(lambda: "replicas are there (a): waiting for more" in run.output(), "a waits")
        run.send("a", signal.SIGTERM)
        began = time.monotonic()
        assert run.results("a")["a"] == {"steps": 0, "status": 128 + signal.SIGTERM}
        assert time.monotonic() - began < 20


def fit_and_die(elastic: Elastic, folder: Path) -> dict[str, Any]:
    return fit_and_save(elastic, folder, RULE.every - 2)


@pytest.mark.slow
def test_sigterm_that_came_before_a_wait_ends_it(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", fit_while_others_are_missing, tmp_path, terminates=True, held=True, patience=1000.0)
        run.start("b", fit_and_die, tmp_path, held=True)
        run.release(*"ab")
        assert run.results("a")["a"]["status"] in (None, 128 + signal.SIGTERM)


def fit_as_b(elastic: Elastic) -> dict[str, Any]:
    return fit(dataclasses.replace(elastic, name="b"), 1, 22)


@pytest.mark.slow
def test_a_second_one_of_a_name_is_refused(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", fit_until_terminated, tmp_path, held=True)
        run.start("b", fit_until_terminated, tmp_path, held=True)
        run.release(*"ab")
        run.wait_for(lambda: step_of(tmp_path, "b") >= 6, "a round")
        run.start("twin", fit_as_b)
        assert "a replica with the name 'b' exists already" in run.error("twin")
        results = run.results("a", "b")
    assert results["a"] == results["b"]
    assert results["b"]["steps"] == 50


@pytest.mark.slow
def test_of_two_new_ones_of_a_name_one_is_refused(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("b", fit, 1, 22, held=True, min_replicas=1)
        run.start("twin", fit_as_b, held=True, min_replicas=1)
        run.release("b", "twin")
        for process in (run.processes["b"], run.processes["twin"]):
            process.join(60)
        ended = sorted(process.exitcode for process in (run.processes["b"], run.processes["twin"]))
        assert ended == [0, 1]
        assert "a replica with the name 'b' exists already" in run.output()


def resumed(elastic: Elastic, folder: Path) -> dict[str, Any]:
    made = trainer(strategy(elastic), max_steps=60, max_epochs=-1)
    model = Scheduled()
    made.fit(model, DataLoader(indexed(), batch_size=4), ckpt_path=folder / "checkpoints" / "step=40.ckpt")
    session = made.strategy.session
    assert session is not None
    assert session.replica is not None
    return {"print": fingerprint(model), "losses": model.losses, "healed": session.replica.num_heals}


@pytest.mark.slow
def test_a_run_that_has_lost_all_its_members_resumes(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, fit_and_save, tmp_path, None)
        run.results("a", "b")
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, resumed, tmp_path)
        results = run.results("a", "b")
    assert results["a"]["print"] == results["b"]["print"]
    assert results["a"]["healed"] == results["b"]["healed"] == 0
    assert len(results["a"]["losses"]) == 20


def test_a_replica_of_several_ranks_is_refused() -> None:
    errors = run_ranks(_refused, 2, process_group=None)
    assert all("replicas of one process each under DDP, but this one has 2" in error for error in errors)


def _refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        trainer(strategy(Elastic(lighthouse="http://127.0.0.1:1"))).fit(Regression(), DataLoader(dataset()))
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer": None}, "elastic needs local steps"),
        ({"outer": DiLoCo(every=5, delay=1)}, "elastic does not support delay"),
        ({"outer": OverlapLocalSGD(every=5)}, "elastic does not support overlaplocalsgd"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowBitDDPStrategy(LoCo(), elastic=Elastic(lighthouse="http://127.0.0.1:1"), **options)
