"""The package chooses: it declines, or keeps what it has tried, and training stays right meanwhile."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Auto, Dense, LoCo, TopK
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.auto import choice as running
from lowbit_strategy.auto.choice import WARM_TRIED_STEPS
from lowbit_strategy.control import Accordion
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_any
from lowbit_strategy.ranks.topology import find_topology
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, scenarios
from testing.training.auto import OWN, STEPS, TRIED, is_hooked, settled
from testing.training.comparing import fingerprint, full_parameters, random_numbers
from testing.training.plain import batch, wrap
from testing.training.regression import BATCH, OUTPUTS, WIDTH, ByStep, Kind, Regression, loader, trainer

LAYOUTS = ("ddp", "fsdp", "hsdp")


def lightning_run(strategy: Any, steps: int = STEPS, **options: Any) -> tuple[Regression, Any]:
    L.seed_everything(0, verbose=False)
    model = Regression(optimizer="plain")
    made = trainer(strategy, max_steps=steps, callbacks=[Hooked()], **options)
    made.fit(model, loader(96 * 12))
    return model, made


class Hooked(L.Callback):
    """Whether anything of this package was between the framework and its communication in each step."""

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        assert trainer.strategy.model is not None
        self.steps.append(is_hooked(trainer.strategy.model))


def hooked(made: L.Trainer) -> list[bool]:
    (callback,) = (each for each in made.callbacks if isinstance(each, Hooked))  # type: ignore[attr-defined]
    return callback.steps


def declining(folder: Path, kind: Kind) -> Facts:
    with nodes_of(2) if kind == "hsdp" else contextlib.nullcontext(), listen() as lines, settled(None, tries=0):
        model, made = lightning_run(f"lowbit_{kind}")
    stock, _ = lightning_run("ddp")
    session = made.strategy.session
    return {
        "losses": model.losses,
        "stock": stock.losses,
        "own": session.is_baseline,
        "phase": session.pace.phase,
        "steps": session.pace.trial_steps,
        "hook": hooked(made),
        "sent": session.sync.ranks.peers.sent_nbytes,
        "lines": lines,
        "counted": session.sync.step_index,
    }


@scenarios(declining, kind=("ddp", "fsdp"))
def test_declining_leaves_the_framework_alone(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["own"]
        assert rank["hook"] == [False] * STEPS
        assert rank["sent"] == 0
        assert rank["steps"] == OWN
        assert rank["counted"] == STEPS
        torch.testing.assert_close(rank["losses"], rank["stock"])
    assert any("no compression: the hook is removed, because the test says so" in line for line in facts[0]["lines"])


@pytest.mark.slow
@scenarios(declining, kind=("hsdp",), world_size=4)
def test_declining_hsdp(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["own"]
        assert rank["hook"] == [False] * STEPS
        torch.testing.assert_close(rank["losses"], rank["stock"])


def nobody_ends_steps(folder: Path, kind: str) -> Facts:
    """A loop that calls `begin_step` between forward and backward, and never `end_step`."""
    with settled(None):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        prepared = prepare(model, Auto(), scatter=kind == "fsdp")
        wrapped = wrap(kind, model)
        own_hooks = len(wrapped._forward_pre_hooks)
        session = attach_ddp(wrapped, prepared) if kind == "ddp" else attach_fsdp(wrapped, prepared)
        session.resume()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = (wrapped(batch(step)) - batch(step)).square().mean()
            session.begin_step()
            loss.backward()
            optimizer.step()
        session.finish()
        facts = {"bits": fingerprint(model), "phase": session.pace.phase, "sent": session.sync.sent_nbytes}
        session.close()
    return facts | {"hooks_left": len(wrapped._forward_pre_hooks) - own_hooks}


@scenarios(nobody_ends_steps, kind=("ddp", "fsdp"))
def test_steps_that_nobody_ends_end_before_the_next_forward_pass(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["phase"] == "settled"
    assert facts[0]["sent"] > 0
    assert facts[0]["hooks_left"] == 0


def stays_with_ddp(folder: Path) -> Facts:
    """DDP's own steps are the same bits, and so are the random numbers that come after."""
    with settled(None, tries=0):
        model, _ = lightning_run("lowbit_ddp")
    ours = fingerprint(model), *random_numbers()
    stock, _ = lightning_run("ddp")
    return {"ours": ours, "stock": (fingerprint(stock), *random_numbers())}


@scenarios(stays_with_ddp)
def test_declined_ddp_has_the_same_bits(facts: list[Facts]) -> None:
    assert facts[0]["ours"] == facts[0]["stock"] == facts[1]["ours"]


def choosing(folder: Path, kind: Kind) -> Facts:
    with nodes_of(2) if kind == "hsdp" else contextlib.nullcontext(), settled(0):
        model, made = lightning_run(f"lowbit_{kind}")
    stock, _ = lightning_run("ddp")
    session = made.strategy.session
    return {
        "stock": stock.losses,
        "chosen": session.pace.active.name,
        "method": session.sync.compressor,
        "losses": model.losses,
        "steps": session.pace.trial_steps,
        "print": fingerprint(model),
        "hook": hooked(made),
        "sent": session.sync.ranks.peers.sent_nbytes,
    }


@scenarios(choosing, kind=("ddp", "fsdp"))
def test_the_chosen_one_stays(facts: list[Facts]) -> None:
    check_chosen(facts)


@pytest.mark.slow
@scenarios(choosing, kind=("hsdp",), world_size=4)
def test_the_chosen_one_stays_under_hsdp(facts: list[Facts]) -> None:
    check_chosen(facts)


def check_chosen(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["chosen"] == "number 0"
        assert rank["method"] == LoCo(block_size=32)
        assert rank["steps"] == OWN + TRIED
        assert rank["hook"] == [False] * OWN + [True] * (STEPS - OWN)
        assert rank["sent"] > 0
        assert rank["print"] == facts[0]["print"]
        torch.testing.assert_close(rank["losses"][:OWN], rank["stock"][:OWN])
        torch.testing.assert_close(rank["losses"], rank["stock"], rtol=0.02, atol=0.01)


# -- nothing is lost --------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Its gradients do not depend on its weights, so that what has been applied in all can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 64, bias=False)
        self.second = nn.Linear(WIDTH, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + (self.second(x) * torch.arange(OUTPUTS)).sum()


def attached(kind: Kind, compressor: Any) -> tuple[nn.Module, Session]:
    torch.manual_seed(0)
    module = Constant()
    options = SyncOptions(shard_size=2 if kind == "hsdp" else None, two_level=False if kind != "hsdp" else None)
    prepared = prepare(module, compressor, options, scatter=kind != "ddp")
    if kind == "ddp":
        model = DistributedDataParallel(module)
        return model, attach_ddp(model, prepared)
    world = torch.distributed.get_world_size()
    shards = 2 if kind == "hsdp" else world
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "data_parallel"))
    shard_any(module, mesh["data_parallel"], torch.device("cpu"), ShardPolicy(min_numel=1))
    return module, attach_fsdp(module, prepared)


def train(model: nn.Module, session: Session, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        loss = model(torch.randn(BATCH, WIDTH, generator=generator))
        session.begin_step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step(optimizer)


KEEPS = (TopK(density=0.1), TopK(density=0.3))


def conserving(folder: Path, kind: Kind) -> Facts:
    found: dict[str, Any] = {}
    with nodes_of(2) if kind == "hsdp" else contextlib.nullcontext():
        for name, compressor in (("auto", Auto()), ("dense", Dense())):
            with settled(None, compressors=KEEPS):
                model, session = attached(kind, compressor)
                train(model, session, range(STEPS))
            found[name] = full_parameters(model)
            if name == "auto":
                found["phase"], found["own"] = session.pace.phase, session.is_baseline
                found["unsent"] = [session.sync.state.export_unsent(name) is None for name in session.sync.specs]
            session.close()
    return found


@scenarios(conserving, kind=("ddp", "fsdp"))
def test_nothing_is_lost_by_trying_and_declining(facts: list[Facts]) -> None:
    check_conserved(facts)


@pytest.mark.slow
@scenarios(conserving, kind=("hsdp",), world_size=4)
def test_nothing_is_lost_under_hsdp(facts: list[Facts]) -> None:
    check_conserved(facts)


def check_conserved(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["phase"] == "settled"
        assert rank["own"]
        assert all(rank["unsent"])
        for name, expected in rank["dense"].items():
            key = name if name in rank["auto"] else f"module.{name}"
            torch.testing.assert_close(rank["auto"][key], expected, rtol=1e-4, atol=1e-5)


# -- checkpoints, looking again, what does not go together ------------------------------------------------------------


def resumed(folder: Path, kind: Kind, stop: int) -> Facts:
    """A run that stops while trying or after it, and goes on from its checkpoint."""
    runs = []
    for to, path in ((stop, None), (STEPS, folder / "last.ckpt")):
        torch.manual_seed(0)
        model = ByStep(optimizer="plain")
        made = trainer(f"lowbit_{kind}", max_steps=to)
        with settled(0, compressors=KEEPS):
            made.fit(model, loader(96 * 12), ckpt_path=path)
            if path is None:
                made.save_checkpoint(folder / "last.ckpt")
        strategy: Any = made.strategy
        runs.append(strategy.session.pace)
    return {"first": runs[0].phase, "then": runs[1].phase, "steps": runs[1].trial_steps, "print": fingerprint(model)}


@scenarios(resumed, kind=("ddp", "fsdp"), stop=(OWN + 3, OWN + TRIED + 2))
def test_a_choice_is_resumed(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        if rank["first"] == "settled":
            assert (rank["then"], rank["steps"]) == ("settled", 0)
        else:
            assert rank["then"] in ("own", "try")  # what was kept has been sent, and the trial starts over
            assert rank["steps"] == STEPS - (OWN + 3) - 1


def looking_again(folder: Path) -> Facts:
    phases = []
    with settled(0), mock.patch.object(running, "LOOK_EVERY", 3), listen() as lines:
        model, session = attached("ddp", Auto())
        train(model, session, range(OWN + TRIED))
        phases.append(session.pace.phase)
        session.pace._reference_s = 1e-9  # as if steps had been far faster then
        session.pace._remaining = 3
        for step in range(OWN + TRIED, OWN + TRIED + 4):
            train(model, session, range(step, step + 1))
            phases.append(session.pace.phase)
    session.close()
    return {"phases": phases, "lines": lines}


@scenarios(looking_again)
def test_it_looks_again_when_steps_change(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["phases"] == ["settled", "settled", "settled", "empty", "own"]
    assert any("looking again" in line for line in facts[0]["lines"])


class Link(nn.Module):
    """Makes steps of the framework's own, or the engine's, as slow as if they had a slow link."""

    def __init__(self, own_s: float, engine_s: float) -> None:
        super().__init__()
        self.own_s, self.engine_s = own_s, engine_s
        self.session: Session | None = None

    def __call__(self, *_: Any) -> None:
        assert self.session is not None
        time.sleep(self.own_s if self.session.is_baseline else self.engine_s)


def following_times(folder: Path) -> Facts:
    """Nothing is decided by the test: the slower of both changes."""
    found: Facts = {}
    for name, link in {"fast": Link(0.02, 0.07), "slow": Link(0.07, 0.02)}.items():
        with mock.patch.multiple(running, LOOK_EVERY=12), listen() as lines:
            model, session = attached("ddp", Auto())
            model.register_forward_pre_hook(link)
            link.session = session
            train(model, session, range(STEPS))
            found[name] = {"first": session.is_baseline, "steps": session.pace.trial_steps}
            link.own_s, link.engine_s = link.engine_s, link.own_s
            train(model, session, range(STEPS, 3 * STEPS))
            found[name] |= {"then": session.is_baseline, "looked": [line for line in lines if "looking again" in line]}
        session.close()
    return found


@scenarios(following_times)
def test_the_faster_one_stays_and_goes_when_it_is_slower(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["fast"]["first"]
        assert not rank["fast"]["then"]
        assert not rank["slow"]["first"]
        assert rank["slow"]["then"]
        given_up = WARM_TRIED_STEPS + 1  # steps of what is far slower
        assert rank["fast"]["steps"] == OWN + 2 * given_up + 1
    assert all(facts[0][name]["looked"] for name in ("fast", "slow"))


def with_others(folder: Path) -> Facts:
    _, session = attached("ddp", Auto())
    errors = []
    with pytest.raises(ValueError, match="Auto chooses this model's compressor") as caught:
        ModelControl(session.sync).adapt(Accordion(light=LoCo(bits=8), heavy=LoCo(bits=2)))
    errors.append(str(caught.value))
    with pytest.raises(ValueError, match="Auto chooses the compressor of every step"):
        prepare(Constant(), Auto(), SyncOptions(outer="diloco"))  # type: ignore[arg-type]
    session.close()
    return {"errors": errors, "nodes": find_topology().num_nodes}


@scenarios(with_others)
def test_what_does_not_go_together(facts: list[Facts]) -> None:
    assert all(len(rank["errors"]) == 1 for rank in facts)


def unfrozen(folder: Path) -> Facts:
    """Lightning wraps the module again while one candidate is tried."""

    class Thaws(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[4].requires_grad_(batch_idx >= OWN + 2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    model = Thaws()
    model.net[4].requires_grad_(requires_grad=False)
    before = model.net[4].weight.detach().clone()
    made = trainer("lowbit_ddp", max_steps=STEPS, callbacks=[Hooked()])
    with settled(0):
        made.fit(model, loader(96 * 12))
    moved = bool((model.net[4].weight != before).any())
    return {"hook": hooked(made), "print": fingerprint(model), "moved": moved}


@scenarios(unfrozen)
def test_a_layer_is_thawed_while_a_candidate_is_tried(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["moved"]
        assert rank["print"] == facts[0]["print"]
        assert rank["hook"][-1]
