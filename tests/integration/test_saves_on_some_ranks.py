"""Saving waits for nobody: each rank saves its own residuals, and what the others did shows when they are loaded."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from lowbit_strategy import LoCo, WeightDelta
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.control import Bounds, Controller, GraVAC, Guard, Static
from lowbit_strategy.custom_loop import CHECKPOINT_KEY, attach_ddp, attach_fsdp, compress, prepare
from testing.log import listen
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.accelerated import make, prepared, train
from testing.training.comparing import fingerprint
from testing.training.plain import batch, wrap
from testing.training.regression import mlp

PLUGIN = LowBitPlugin(LoCo(bits=4))
LADDER = tuple(LoCo(bits=bits, block_size=32) for bits in (8, 4, 2))


def on_the_main_process(folder: Path) -> Facts:
    """As scripts do that know DDP: twice under ``is_main_process``, then a resume, after which all ranks save."""
    job = prepared(make("ddp", PLUGIN))
    train(job, 2)
    with listen() as lines:
        for name, steps in (("first", 3), ("second", 4)):
            if job.accelerator.is_main_process:
                job.accelerator.save_state(str(folder / name))
            train(job, steps, skip=steps - 1)
    job.accelerator.wait_for_everyone()
    again = prepared(make("ddp", PLUGIN))
    with listen() as resumed:
        again.accelerator.load_state(str(folder / "first"))
    train(again, 3, skip=2)
    again.accelerator.save_state(str(folder / "first"))  # into the same folder, and now on all ranks
    train(again, 4, skip=3)
    whole = prepared(make("ddp", PLUGIN))
    whole.accelerator.load_state(str(folder / "first"))
    train(whole, 4, skip=3)
    strict = prepared(make("ddp", LowBitPlugin(LoCo(bits=4), on_missing_residual="error")))
    return {
        "lines": lines,
        "resumed": resumed,
        "steps": whole.sync.step_index,
        "same": fingerprint(whole.model) == fingerprint(again.model),
        "files": sorted(path.name[:15] for path in (folder / "first" / "residuals.lowbit").iterdir()),
        "strict": raised(lambda: strict.accelerator.load_state(str(folder / "second"))),
    }


@scenarios(on_the_main_process)
def test_accelerate_saves_on_the_main_process_alone(facts: list[Facts]) -> None:
    (noticed,) = facts[0]["lines"]
    assert "has no residuals of rank 1, which did not save" in noticed
    assert facts[1]["lines"] == facts[1]["resumed"] == []
    (warning,) = facts[0]["resumed"]
    assert "is missing. It was lost, or the checkpoint was saved without this rank" in warning
    assert warning.endswith("continuing with residuals of zero on all ranks")
    for rank in facts:
        assert rank["strict"].startswith("ResidualFileError: rank 1: the checkpoint's residual file ")
        assert rank["steps"] == 4
        assert rank["same"]  # to the bit, once all have saved
        assert rank["files"] == ["stamp.json", "step-3-rank-0-o", "step-3-rank-1-o"]


class _Plain:
    """A loop without a framework, from a checkpoint if one is given."""

    def __init__(self, path: Path | None = None, optimizer: Callable[..., torch.optim.Optimizer] = AdamW) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.model = DistributedDataParallel(self.net)
        self.optimizer = optimizer(self.net.parameters(), lr=1e-2)
        self.session = compress(self.model, self.optimizer, LoCo())
        if path is not None:
            saved = torch.load(path, weights_only=True)
            self.net.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.session.load(path, saved[CHECKPOINT_KEY])
            self.session.resume()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def save(self, path: Path, write: Callable[..., Any] = torch.save) -> None:
        with self.session.save(path) as stamp:
            if dist.get_rank() == 0:
                state = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
                write({**state, CHECKPOINT_KEY: stamp}, path)


def late(folder: Path) -> Facts:
    """Rank 1 saves after rank 0 has gone on; then rank 0 alone, later all again: what all have saved is to the bit."""
    loop = _Plain()
    loop.train(0, 3)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    loop.save(folder / "all.pt")
    loop.train(3, 4)
    if dist.get_rank() == 0:
        loop.save(folder / "all.pt")  # replaces it
        loop.save(folder / "alone.pt")
    loop.train(4, 5)
    for _ in range(2):
        loop.save(folder / "all.pt")
    loop.train(5, 7)
    dist.barrier()
    found = sorted(path.name[:15] for path in (folder / "all.pt.lowbit").iterdir())
    again = _Plain(folder / "all.pt")
    again.train(5, 7)
    alone = _Plain(folder / "alone.pt")
    alone.train(4, 7)
    return {
        "files": found,
        "same": fingerprint(again.net) == fingerprint(loop.net),
        "alone": fingerprint(alone.net) != fingerprint(loop.net),
    }


@scenarios(late)
def test_a_plain_loop_in_which_ranks_save_at_different_times(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["files"] == ["step-5-rank-0-o", "step-5-rank-1-o"]
        assert rank["same"]
        assert rank["alone"]  # its residuals started from zero


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "gravac": lambda: GraVAC(candidates=LADDER, epsilon=0.2, window=2, settle=0, omega=0.0),
    "guard": lambda: Guard(inner=Static(LADDER[1]), bounds=Bounds(max_error=0.2, patience=1), observe_every=1),
}


class _NeverEnded:
    """A loop by hand that does not call `end_step`, whose parameters are compared after the second and tenth step."""

    def __init__(self, controller: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.BatchNorm1d(32))
        prepared = prepare(self.net, LADDER[0])
        self.model = DistributedDataParallel(self.net)  # which sends buffers before each forward pass
        self.session = attach_ddp(self.model, prepared)
        self.control = ModelControl(self.session.sync)
        self.control.adapt(CONTROLLERS[controller]()).timer = itertools.count().__next__
        self.control.monitor(MonitorOptions(every_n_steps=2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.session.resume()

    def train(self, step: int) -> None:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        self.session.begin_step()
        loss.backward()
        self.optimizer.step()

    def observed(self) -> int:
        """The last observed step."""
        assert self.control.observer is not None
        assert self.control.observer.last is not None
        return self.control.observer.last.step

    def save(self, path: Path) -> Any:
        with self.session.save(path) as stamp:
            return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), stamp))

    def load(self, path: Path, saved: Any) -> None:
        model, optimizer, stamp = saved
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.session.load(path, stamp)
        self.session.resume()


def never_ended(folder: Path, controller: str) -> Facts:
    """Rank 0 saves after each step but the last; no rank has ended it."""
    plain, loop, again = (_NeverEnded(controller) for _ in range(3))
    for step in range(11):
        plain.train(step)
        loop.train(step)
        if dist.get_rank() == 0 and step < 10:
            loop.save(folder / "alone.pt")
            time.sleep(0.1)
        if step == 5:
            saved = loop.save(folder / "all.pt")
    again.load(folder / "all.pt", saved)
    for step in range(6, 11):
        again.train(step)
    return {
        "same": fingerprint(loop.net) == fingerprint(plain.net),
        "resumed": fingerprint(again.net) == fingerprint(loop.net),
        "steps": [each.session.sync.step_index for each in (plain, loop, again)],
        "levels": [each.control.driver.levels for each in (plain, loop, again) if each.control.driver is not None],
        "observed": [each.observed() for each in (plain, loop, again)],
    }


@scenarios(never_ended, controller=CONTROLLERS)
def test_one_rank_saves_while_a_step_is_open(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"]
        assert rank["resumed"]
        assert rank["steps"] == [10] * 3
        assert rank["levels"][0] == rank["levels"][1] == rank["levels"][2] != {}
        assert rank["observed"] == [8] * 3


def never_ended_shards(folder: Path) -> Facts:
    """The same where FSDP2 shards the model, and what ranks keep of weights is older than the optimizer's step."""
    prints = []
    for saves in (False, True):
        torch.manual_seed(0)
        net = mlp()
        made = prepare(net, LADDER[1], scatter=True)
        model = wrap("fsdp", net)
        session = attach_fsdp(model, made)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        session.resume()
        for step in range(5):
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            session.begin_step()
            loss.backward()
            optimizer.step()
            if saves and dist.get_rank() == 0 and step in (1, 2):
                with session.save(folder / "alone.pt"):
                    pass
                time.sleep(0.1)
        session.finish()
        prints.append(fingerprint(net))
        session.close()
    return {"same": prints[0] == prints[1]}


@scenarios(never_ended_shards)
def test_one_rank_saves_its_part_while_a_step_is_open(facts: list[Facts]) -> None:
    assert all(rank["same"] for rank in facts)


def differences(folder: Path) -> Facts:
    """FSDP2's weights as differences: a resumed run without one rank's file starts them over on all ranks."""
    norms = []
    for resumed in (False, True):
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session = compress(net, optimizer, LoCo(), weights=WeightDelta())
        path = folder / "checkpoint"
        if resumed:
            session.load(path, torch.load(path, weights_only=True)[CHECKPOINT_KEY])
        for _ in range(3):
            net(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not resumed and dist.get_rank() == 0:
            with session.save(path) as stamp:
                torch.save({CHECKPOINT_KEY: stamp}, path)
        dist.barrier()
        norms.append(float(net(torch.ones(2, 64)).square().sum()))
        session.close()
    return {"norms": norms}


@scenarios(differences)
def test_differences_of_weights_start_over_on_all_ranks(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]


def failed(folder: Path) -> Facts:
    """Rank 0 cannot write the checkpoint, for several saves on end: the one before keeps all its files, none are left
    of the others.
    """

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    loop = _Plain()
    loop.train(0, 2)
    loop.save(folder / "one.pt")
    errors = []
    for step in range(2, 5):
        loop.train(step, step + 1)
        for path in (folder / "one.pt", folder / "other.pt"):
            errors.append(raised(functools.partial(loop.save, path, fails)))
    dist.barrier()
    found = {path.name: sorted(each.name[:15] for each in path.iterdir()) for path in folder.glob("*.lowbit")}
    again = _Plain(folder / "one.pt")
    again.train(2, 5)
    loop.save(folder / "one.pt")
    dist.barrier()
    after = sorted(path.name[:15] for path in (folder / "one.pt.lowbit").iterdir())
    return {
        "errors": errors,
        "found": found,
        "same": fingerprint(again.net) == fingerprint(loop.net),
        "after": after,
    }


@scenarios(failed)
def test_a_checkpoint_that_cannot_be_written(facts: list[Facts]) -> None:
    assert facts[0]["errors"] == ["OSError: no space left"] * 6
    for rank in facts:
        assert {"step-2-rank-0-o", "step-2-rank-1-o"} <= set(rank["found"]["one.pt.lowbit"])
        assert not any("rank-0" in name for names in rank["found"].values() for name in names if "step-2" not in name)
        assert rank["same"]
        assert rank["after"] == ["step-5-rank-0-o", "step-5-rank-1-o"]


def without_the_session(folder: Path) -> Facts:
    """A loop's own checkpoint, written and read as without compression, and one that the session saves."""
    own, loop, again = [], _Plain(), _Plain()
    for steps in (1, 2):
        loop.train(steps - 1, steps)
        state = loop.optimizer.state_dict()
        with listen() as lines:
            loop.train(steps, steps + 1)
        own.append(list(lines))
    again.optimizer.load_state_dict(state)
    with listen() as loaded:
        again.train(2, 3)
    loop = _Plain()
    loop.train(0, 1)
    loop.save(folder / "saved.pt")
    resumed = _Plain(folder / "saved.pt")
    with listen() as right:
        loop.train(1, 2)
        resumed.train(1, 2)
    return {"own": own, "loaded": loaded, "right": right}


def loaded_into(folder: Path, optimizer: str) -> Facts:
    """A loop that loads as torch.distributed.checkpoint does, into the state that it has read before."""
    make = {"adamw": AdamW, "sgd": SGD}[optimizer]
    loop, resumed = _Plain(optimizer=make), _Plain(optimizer=make)
    loop.train(0, 2)
    states: dict[str, Any] = get_optimizer_state_dict(loop.net, loop.optimizer)
    with loop.session.save(folder / "x") as stamp:
        dcp.save({"model": loop.net.state_dict(), "optimizer": states}, checkpoint_id=folder / "x")
    states = get_optimizer_state_dict(resumed.net, resumed.optimizer)
    dcp.load({"model": resumed.net.state_dict(), "optimizer": states}, checkpoint_id=folder / "x")
    set_optimizer_state_dict(resumed.net, resumed.optimizer, states)
    resumed.session.load(folder / "x", stamp)
    with listen() as lines:
        for each in (loop, resumed):
            each.train(2, 4)
    return {"lines": lines, "same": fingerprint(loop.net) == fingerprint(resumed.net)}


@scenarios(loaded_into, optimizer=("adamw", "sgd"))
def test_a_loop_that_loads_into_the_state_that_it_has_read_is_told_nothing(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"lines": [], "same": True}


@scenarios(without_the_session)
def test_a_loop_that_saves_without_the_session_is_told_so_once(facts: list[Facts]) -> None:
    (written,), again = facts[0]["own"]
    assert again == []
    assert "the optimizer's state was read without the session" in written
    assert "session.save" in written
    (loaded,) = facts[0]["loaded"]
    assert "the optimizer's state was loaded without the session" in loaded
    assert facts[0]["right"] == facts[1]["loaded"] == []
