"""Training through Fabric, under DDP and FSDP2, on two real processes."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowbit_strategy import LoCo, TopK
from lowbit_strategy.attach.mistakes import MANY_PASSES
from lowbit_strategy.fabric import LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.fabric.adapt import engine_of
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.comparing import fingerprint, full_parameters
from testing.training.fabric import Batches, batches, launch, setup, train
from testing.training.regression import KINDS, MIN_SHARD_NUMEL, Kind, mlp


def fabric(kind: Kind, precision: Any = "32-true", **options: Any) -> L.Fabric:
    if kind == "ddp":
        return launch(LowBitDDPStrategy(LoCo(block_size=32), bucket_cap_mb=0.01, **options), precision=precision)
    strategy = LowBitFSDPStrategy(LoCo(block_size=32), min_shard_numel=MIN_SHARD_NUMEL, **options)
    return launch(strategy, precision=precision)


def by_name(folder: Path, kind: Kind) -> Facts:
    made = launch(f"loco_{kind}")
    net = mlp()
    model, optimizer = setup(made, net)
    losses = train(made, model, optimizer, 3 * batches(made.global_rank))
    sync = made.strategy.sessions[0].sync
    return {"losses": losses, "print": fingerprint(net), "sent": sync.ranks.peers.sent_nbytes, "steps": sync.step_index}


@scenarios(by_name, kind=KINDS)
def test_by_name(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    for rank in facts:
        assert sum(rank["losses"][-8:]) < 0.5 * sum(rank["losses"][:8])
        assert rank["sent"] > 0
        assert rank["steps"] == 24


def apart(folder: Path, kind: Kind) -> Facts:
    facts: Facts = {}
    for how in ("together", "apart"):
        torch.manual_seed(0)
        made = fabric(kind)
        net = mlp()
        if how == "together":
            model, optimizer = setup(made, net)
        else:
            model = made.setup_module(net)
            optimizer = made.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-2))
        losses = train(made, model, optimizer, batches(made.global_rank))
        facts[how] = {"losses": losses, "print": fingerprint(net)}
    return facts


@scenarios(apart, kind=KINDS, slow=all_but(kind="ddp"))
def test_model_and_optimizer_set_up_together_or_apart(facts: list[Facts]) -> None:
    assert facts[0]["together"]["print"] == facts[1]["together"]["print"]
    for rank in facts:
        assert rank["together"] == rank["apart"]


def accumulation(folder: Path, kind: Kind) -> Facts:
    made = fabric(kind)
    net = mlp()
    model, optimizer = setup(made, net)
    calls = []
    with count_exchanges() as sizes:
        for i, (x, y) in enumerate(batches(made.global_rank)):
            last = i % 4 == 3
            with made.no_backward_sync(model, enabled=not last):
                made.backward(F.mse_loss(model(x), y))
            if last:
                made.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            calls.append(len(sizes))
    return {"calls": calls, "print": fingerprint(net), "steps": made.strategy.sessions[0].sync.step_index}


@scenarios(accumulation, kind=KINDS, slow=all_but(kind="ddp"))
def test_accumulation_compresses_once_a_step(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    calls = facts[0]["calls"]
    assert calls[2] == 0
    assert 0 < calls[3] == calls[6] < calls[7]
    assert facts[0]["steps"] == 2


def clipped(folder: Path, kind: Kind) -> Facts:
    made = launch((LowBitDDPStrategy if kind == "ddp" else LowBitFSDPStrategy)(TopK(density=0.1)))
    model, optimizer = setup(made, mlp())
    with listen() as logged:
        for x, y in batches(made.global_rank)[:2]:
            made.backward(F.mse_loss(model(x), y))
            made.clip_gradients(model, optimizer, max_norm=1.0)
            made.clip_gradients(model, optimizer, clip_val=1.0)
            optimizer.step()
    return {"warned": [line for line in logged if "clips the sparse mean gradient" in line]}


@scenarios(clipped, kind=("ddp",))
def test_clipping_what_a_sparse_method_has_sent_is_warned_of_once(facts: list[Facts]) -> None:
    assert [line.partition(" ")[0] for line in facts[0]["warned"]] == ["max_norm=1.0"]
    assert facts[1]["warned"] == []


def precision(folder: Path, kind: Kind, name: str) -> Facts:
    made = fabric(kind, precision=name)
    net = mlp()
    losses = train(made, *setup(made, net), 3 * batches(made.global_rank))
    return {"losses": losses, "print": fingerprint(net)}


@scenarios(precision, kind=KINDS, name=("bf16-mixed", "bf16-true"))
def test_precision(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert sum(facts[0]["losses"][-8:]) < 0.7 * sum(facts[0]["losses"][:8])


def resume(folder: Path, kind: Kind, distributed: bool) -> Facts:
    options = {"save_distributed_checkpoint": distributed} if kind == "fsdp" else {}
    made = fabric(kind, **options)
    rank, path = made.global_rank, folder / "state.ckpt"
    net = mlp()
    model, optimizer = setup(made, net)
    train(made, model, optimizer, batches(rank, 0, 4))
    made.save(path, {"model": model, "optimizer": optimizer, "step": 4})
    uninterrupted = train(made, model, optimizer, batches(rank, 4, 8))
    expected = fingerprint(net)

    made = fabric(kind, **options)
    net = mlp()
    model, optimizer = setup(made, net)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = made.load(path, state)
    resumed = train(made, model, optimizer, batches(rank, 4, 8))
    return {
        "uninterrupted": uninterrupted,
        "resumed": resumed,
        "same": fingerprint(net) == expected,
        "step": state["step"],
        "rest": rest,
    }


@scenarios(resume, kind=KINDS, distributed=(False, True))
def test_resume_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["uninterrupted"]
        assert rank["same"]
        assert rank["step"] == 4
        assert rank["rest"] == {}


def weights_only(folder: Path, kind: Kind) -> Facts:
    options = {"save_distributed_checkpoint": False} if kind == "fsdp" else {}
    made = fabric(kind, **options)
    net = mlp()
    model, optimizer = setup(made, net)
    train(made, model, optimizer, batches(made.global_rank))
    made.save(folder / "all.ckpt", {"model": model})
    made.save(folder / "weights.ckpt", {"model": net.state_dict()} if kind == "ddp" else {"model": model})
    keys = sorted(torch.load(folder / "all.ckpt", weights_only=True))
    other = mlp()
    again = made.setup_module(other)
    made.load(folder / "all.ckpt", {"model": again})
    return {"keys": keys, "same": fingerprint(other) == fingerprint(net)}


@scenarios(weights_only, kind=KINDS, slow=all_but(kind="ddp"))
def test_checkpoint_loads_weights_only(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["keys"] == ["lowbit_strategy", "model"]
        assert rank["same"]


def two_models(folder: Path, kind: Kind) -> Facts:
    made = fabric(kind)
    nets = [mlp(), nn.Linear(16, 128)]

    def step(pairs: list[Any], data: Batches) -> list[int]:
        for x, y in data:
            for (model, optimizer), target in zip(pairs, (y, torch.zeros(4, 128)), strict=True):
                optimizer.zero_grad()
                made.backward(F.mse_loss(model(x), target), model=model)
                optimizer.step()
        return [fingerprint(net) for net in nets]

    rank = made.global_rank
    pairs = [setup(made, net) for net in nets]
    step(pairs, batches(rank, 0, 4))
    for i, (model, optimizer) in enumerate(pairs):  # FSDP2 saves one model in a checkpoint
        made.save(folder / f"{i}.ckpt", {"model": model, "optimizer": optimizer})
    expected = step(pairs, batches(rank, 4, 8))
    steps = [session.sync.step_index for session in made.strategy.sessions]

    made = fabric(kind)
    nets = [mlp(), nn.Linear(16, 128)]
    pairs = [setup(made, net) for net in nets]
    for i, (model, optimizer) in enumerate(pairs):
        made.load(folder / f"{i}.ckpt", {"model": model, "optimizer": optimizer})
    return {"steps": steps, "expected": expected, "resumed": step(pairs, batches(rank, 4, 8))}


@scenarios(two_models, kind=KINDS, slow=all_but(kind="ddp"))
def test_two_models(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == [8, 8]
    assert facts[0]["resumed"] == facts[0]["expected"]


def one_after_another(folder: Path, kind: str) -> Facts:
    """Models are deleted, as in cross-validation."""
    made = fabric(kind)
    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    counts = []
    for _ in range(3):
        net = mlp()
        alive.add(net)
        model, optimizer = setup(made, net)
        train(made, model, optimizer, batches(made.global_rank, 0, 2))
        del net, model, optimizer
        gc.collect()
        counts.append((len(alive), len(made.strategy.sessions)))
    return {"counts": counts}


def one_of_two(folder: Path) -> Facts:
    """Only the second of two models is trained, then it remains alone."""
    made = fabric("ddp")
    pairs = [setup(made, mlp()) for _ in range(2)]
    with listen() as logged:
        for _ in range(MANY_PASSES // 8 + 1):
            train(made, *pairs[1], batches(made.global_rank))
    del pairs[0]
    gc.collect()
    sync = engine_of(made)
    made.save(folder / "ckpt", {"model": pairs[0][0].state_dict()})
    return {
        "warned": [line for line in logged if "no step has ended" in line],
        "steps": sync.step_index,
        "saved": any(folder.glob("*.lowbit/*")),
        "folders": [path.name for path in folder.glob("*.lowbit/*") if path.is_dir()],
    }


@scenarios(one_of_two)
def test_a_model_that_is_not_trained_or_gone_does_not_matter(facts: list[Facts]) -> None:
    assert facts[0]["warned"] == []
    assert facts[0]["steps"] == 8 * (MANY_PASSES // 8 + 1)
    assert facts[0]["saved"]
    assert facts[0]["folders"] == []  # the residuals are the first model's


@scenarios(one_after_another, kind=("ddp", "fsdp"))
def test_a_deleted_model_is_freed(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["counts"] == [(0, 0)] * 3


def loaded_after_validation(folder: Path) -> Facts:
    """A forward pass without a backward pass leaves the model gathered, whose parameters are others then."""
    made = fabric("fsdp")
    net = nn.Linear(16, 8)
    model, optimizer = setup(made, net)
    state = {"model": model, "optimizer": optimizer}
    rank = made.global_rank
    train(made, model, optimizer, batches(rank, 0, 4))
    made.save(folder / "saved.ckpt", state)
    found, serves = [], []
    for _ in range(2):
        train(made, model, optimizer, batches(rank, 4, 8))
        found.append(fingerprint(net))
        with torch.no_grad():
            model(batches(rank, 0, 1)[0][0])
        serves.append(made.strategy.sessions[0].serves(model))
        made.load(folder / "saved.ckpt", state)
    return {"found": found, "serves": serves}


@scenarios(loaded_after_validation)
def test_residuals_are_loaded_after_a_validation(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["found"][0] == rank["found"][1]
        assert all(rank["serves"])


def shared_trunk(folder: Path) -> Facts:
    """Two models that share a layer, the second one trained every other time."""
    found: Facts = {}
    for strategy in ("ddp", "dense_ddp", "loco_ddp"):
        made = launch(strategy)
        torch.manual_seed(0)
        trunk = nn.Linear(16, 32)
        nets = [nn.Sequential(trunk, nn.Tanh(), nn.Linear(32, width)) for width in (8, 4)]
        pairs = [setup(made, net) for net in nets]
        for step, (x, y) in enumerate(batches(made.global_rank)):
            for model, optimizer in pairs[: 1 + step % 2]:
                out = model(x)
                optimizer.zero_grad()
                made.backward(F.mse_loss(out, y[:, : out.shape[1]]), model=model)
                optimizer.step()
        sessions = getattr(made.strategy, "sessions", [])
        found[strategy] = {"bits": list(map(fingerprint, nets)), "steps": [each.sync.step_index for each in sessions]}
    return found


@scenarios(shared_trunk)
def test_models_that_share_a_layer(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["dense_ddp"]["bits"] == facts[0]["ddp"]["bits"]
    assert facts[0]["loco_ddp"]["steps"] == facts[0]["dense_ddp"]["steps"] == [8, 4]


def names_that_collide(folder: Path) -> Facts:
    """A checkpoint of two models, and one whose name is the first one's with a number."""
    made = fabric("ddp")
    nets = [mlp(), nn.Linear(16, 128)]
    pairs = [setup(made, net) for net in nets]

    def step(start: int, stop: int) -> list[int]:
        for x, y in batches(made.global_rank, start, stop):
            for (model, optimizer), target in zip(pairs, (y, torch.zeros(4, 128)), strict=True):
                optimizer.zero_grad()
                made.backward(F.mse_loss(model(x), target), model=model)
                optimizer.step()
        return [fingerprint(net) for net in nets]

    state = {f"{what}{i}": part for i, pair in enumerate(pairs) for what, part in zip("mo", pair, strict=True)}
    step(0, 3)
    made.save(folder / "ckpt", state)
    expected = step(3, 6)
    made.save(folder / "ckpt.1", {"model": pairs[0][0], "optimizer": pairs[0][1]})  # removes what is not its own
    made.load(folder / "ckpt", state)
    return {"expected": expected, "resumed": step(3, 6), "files": sorted(path.name for path in folder.iterdir())}


@scenarios(names_that_collide)
def test_files_of_a_second_model_have_a_name_that_no_checkpoint_has(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["resumed"] == facts[0]["expected"]
    assert facts[0]["files"] == ["ckpt", "ckpt.1", "ckpt.1.lowbit", "ckpt.lowbit"]


def unfreezing(folder: Path, kind: Kind) -> Facts:
    made = fabric(kind)
    net = mlp()
    net[0].requires_grad_(False)
    before = net[0].weight.detach().clone()
    model, optimizer = setup(made, net)
    train(made, model, optimizer, batches(made.global_rank, 0, 2))
    net[0].requires_grad_(True)
    error = ""
    if kind == "ddp":
        error = raised(lambda: train(made, model, optimizer, batches(made.global_rank, 2, 4)))
        model, optimizer = setup(made, net)
    train(made, model, optimizer, batches(made.global_rank, 2, 4))
    sessions = made.strategy.sessions
    return {
        "error": error,
        "moved": not torch.equal(full_parameters(net)["0.weight"], before),
        "served": ["0.weight" in session.sync.specs for session in sessions],
        "steps": [session.sync.step_index for session in sessions],
        "print": fingerprint(net),
    }


@scenarios(unfreezing, kind=KINDS)
def test_unfreezing(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["moved"]
    assert facts[0]["served"] == [True]
    assert facts[0]["steps"] == [4]
    if "ddp" in request.node.name:
        assert "0.weight was frozen when the model was set up and is trained now" in facts[0]["error"]


def misuse(folder: Path, kind: Kind) -> Facts:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = {"nothing": raised(lambda: launch(f"lcoo_{kind}"))}
    errors["advice"] = " ".join(str(warning.message) for warning in caught)
    made = fabric(kind)
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    F.mse_loss(net(torch.ones(1, 16)), torch.ones(1, 8)).backward()
    optimizer.step()
    if kind == "fsdp":
        errors["used optimizer"] = raised(lambda: made.setup(net, optimizer))
    errors["type"] = raised(lambda: made.setup_module(mlp().double()))
    inference = mlp().requires_grad_(False)
    errors["inference"] = raised(lambda: made.setup_module(inference))
    return errors


@scenarios(misuse, kind=KINDS)
def test_misuse(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    assert facts[0] == facts[1]
    errors = facts[0]
    assert "did you mean 'loco_" in errors["advice"]
    assert "invalid strategy name" in errors["nothing"]
    assert "parameter 0.weight is torch.float64: gradients are reduced as float32" in errors["type"]
    if "fsdp" in request.node.name:
        assert errors["used optimizer"].startswith("ValueError: set the model and optimizer up before the first step")
        assert errors["inference"] == ""
