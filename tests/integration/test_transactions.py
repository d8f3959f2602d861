"""Which reductions count: those that an optimizer steps on, in any loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import PRESETS, DiLoCo, LocalSGD, LoCo, PostLocalSGD
from lowbit_strategy import fabric as with_fabric
from lowbit_strategy.accelerate import LowBitAccelerator, LowBitPlugin, binding_of
from lowbit_strategy.custom_loop import Session, SyncOptions, attach_ddp, attach_fsdp, compress, prepare
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from testing.log import listen
from testing.processes.scenarios import Facts, none, raised, scenarios
from testing.training.accelerated import fresh_state, fsdp_plugin
from testing.training.comparing import fingerprint
from testing.training.ddp_loop import Loop
from testing.training.fabric import launch
from testing.training.optimizers import Lookahead
from testing.training.plain import COMPRESSORS, batch, local_values, wrap
from testing.training.regression import Regression, loader, mlp, strategy, trainer


def attached(kind: str, net: nn.Module, compressor: Any, **options: Any) -> tuple[Any, Session]:
    prepared = prepare(net, compressor, SyncOptions(**options), scatter=kind == "fsdp")
    model = wrap(kind, net)
    return model, (attach_ddp if kind == "ddp" else attach_fsdp)(model, prepared)


# -- optimizers --------------------------------------------------------------------------------------------------------


NESTED = {
    "lookahead": lambda params: Lookahead(torch.optim.Adam(params, lr=1e-2)),
    "zero": lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=1e-2),
}


def nested(folder: Path, which: str, second_moment: bool) -> Facts:
    torch.manual_seed(0)
    net = mlp()
    model, session = attached("ddp", net, PRESETS["loco1"], second_moment=second_moment)
    optimizer = NESTED[which](list(net.parameters()))
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        session.begin_step()
        loss = (model(batch(step % 3)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        session.end_step(optimizer)
        losses.append(loss.item())
    return {"print": fingerprint(net), "steps": session.sync.step_index, "losses": losses}


@scenarios(nested, which=tuple(NESTED), second_moment=(False, True), slow=none)
def test_an_optimizer_inside_another_one_takes_one_step(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["steps"] == 12
    assert facts[0]["losses"][-1] < facts[0]["losses"][0]


class Uneven(Regression):
    """Two optimizers, of which the second steps in every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, rarely = self.optimizers()
        loss = self.loss(batch)
        often.zero_grad()
        rarely.zero_grad()
        self.manual_backward(loss)
        often.step()
        if batch_idx % 3 == 2:
            rarely.step()

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return [torch.optim.AdamW(part, lr=1e-2) for part in (params[:2], params[2:])]


def uneven(folder: Path, kind: Any) -> Facts:
    rule = DiLoCo(every=4, synchronous=6)
    model = Uneven()
    made = trainer(strategy(kind, outer=rule), max_steps=24)
    made.fit(model, loader(96 * 6))
    return {"print": [p.sum().item() for p in local_values(model.parameters())], "steps": made.strategy.sync.step_index}


@scenarios(uneven, kind=("ddp", "hsdp"))
def test_optimizers_of_different_frequency_begin_local_steps_alike(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["steps"] == 18, "24 steps of optimizers in 18 batches"


def resumed(folder: Path, kind: Any) -> Facts:
    rule = DiLoCo(every=4)
    made = trainer(strategy(kind, outer=rule), max_steps=12)
    made.fit(Uneven(), loader(96 * 6))
    made.save_checkpoint(folder / "saved.ckpt")
    model = Uneven()
    made = trainer(strategy(kind, outer=rule), max_steps=20)
    made.fit(model, loader(96 * 6), ckpt_path=folder / "saved.ckpt")
    return {"steps": made.global_step, "print": [p.sum().item() for p in local_values(model.parameters())]}


@scenarios(resumed, kind=("ddp", "hsdp"))
def test_local_steps_of_two_optimizers_resume(facts: list[Facts]) -> None:
    assert facts[0]["steps"] == 20
    assert facts[0]["print"] == facts[1]["print"]


STEPS_IN_TURNS = 128


def in_turns(folder: Path) -> Facts:
    """Two networks train in turns: a bucket comes in every second step."""
    torch.manual_seed(0)
    parts = nn.ModuleList([mlp(), mlp()])
    loop = Loop(Chosen(parts), PRESETS["loco1"], SyncOptions(second_moment=True), find_unused_parameters=True)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
    for step in range(STEPS_IN_TURNS):
        loop.net.at = step % 2
        optimizers[step % 2].zero_grad()
        loop.session.begin_step()
        loop.model(batch(step)).square().mean().backward()
        optimizers[step % 2].step()
        loop.session.end_step(optimizers[step % 2])
    known = loop.session.sync.transactions.follower.state_dict()["known"]
    return {"last": min(each["exchanged"] for each in known.values())}


class Chosen(nn.Module):
    """One of several modules."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts, self.at = parts, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[self.at](x)


@scenarios(in_turns)
def test_networks_in_turns_go_on_exchanging_squares(facts: list[Facts]) -> None:
    assert facts[0]["last"] >= STEPS_IN_TURNS - 2 * 32


# -- loops -------------------------------------------------------------------------------------------------------------


class Manual(Regression):
    """Manual optimization, which notes in which steps the ranks' gradients are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.same = ""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        mine = self.net[0].bias.grad.norm().view(1)
        both = [torch.zeros_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        self.same += "=" if torch.equal(*both) else "."
        optimizer.step()


RULES = {
    "diloco": (DiLoCo(every=50), "." * 12),
    "post": (PostLocalSGD(every=5, synchronous=4), "====" + "." * 8),
}


def manual(folder: Path, rule: str) -> Facts:
    model = Manual()
    trainer(strategy("ddp", outer=RULES[rule][0]), max_steps=12).fit(model, loader())
    return {"same": model.same, "expected": RULES[rule][1]}


@scenarios(manual, rule=tuple(RULES))
def test_local_steps_are_local_under_manual_optimization(facts: list[Facts]) -> None:
    assert facts[0]["same"] == facts[0]["expected"]


def loop_of(folder: Path, kind: str, how: str, outer: Any, num_forwards: int) -> Facts:
    """By hand, without telling when a step ends, or with one call."""

    def run(how: str) -> tuple[list[Tensor], int, int]:
        torch.manual_seed(0)
        net = mlp()
        if how == "one call":
            model = wrap(kind, net)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            session = compress(model, optimizer, COMPRESSORS["loco"], outer=outer)
        else:
            model, session = attached(kind, net, COMPRESSORS["loco"], outer=outer)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(8):
            optimizer.zero_grad()
            if how != "one call":
                session.begin_step()
            loss = sum(model(batch(step + 10 * at)).square().mean() for at in range(num_forwards))
            loss.backward()
            optimizer.step()
            if how == "by hand":
                session.end_step(optimizer)
        session.finish()
        return local_values(net.parameters()), session.sync.ranks.peers.sent_nbytes, session.sync.step_index

    (one, sent, steps), (other, expected, _) = run(how), run("by hand")
    return {"same": all(map(torch.equal, one, other)), "sent": sent == expected, "steps": steps}


@scenarios(loop_of, kind=("ddp", "fsdp"), how=("one call", "never ended"), outer=(None,), num_forwards=(1, 2))
def test_a_loop_trains_alike_however_it_tells_its_steps(facts: list[Facts]) -> None:
    assert facts[0]["same"]
    assert facts[0]["sent"]
    assert facts[0]["steps"] == 8


@scenarios(
    loop_of, kind=("ddp",), how=("one call", "never ended"), outer=(DiLoCo(every=3),), num_forwards=(1,), slow=none
)
def test_local_steps_are_alike_however_a_loop_tells_its_steps(facts: list[Facts]) -> None:
    assert facts[0]["same"]
    assert facts[0]["steps"] == 8


def accumulated(folder: Path) -> Facts:
    torch.manual_seed(0)
    net = mlp()
    model = wrap("ddp", net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = compress(model, optimizer, COMPRESSORS["loco"])
    sent = []
    for step in range(4):
        with model.no_sync():
            model(batch(step)).square().mean().backward()
        sent.append(session.sync.ranks.peers.sent_nbytes)
        model(batch(step + 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(session.sync.ranks.peers.sent_nbytes)
    return {"sent": sent, "steps": session.sync.step_index, "print": fingerprint(net)}


@scenarios(accumulated)
def test_one_call_serves_accumulation(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["steps"] == 4
    before, after = facts[0]["sent"][2::2], facts[0]["sent"][1::2]
    assert before == after[:-1], "nothing is sent without synchronization"
    assert after == sorted(set(after))


def skipped(folder: Path) -> Facts:
    """A loss scaler skips the third step."""
    torch.manual_seed(0)
    net = mlp()
    model = wrap("ddp", net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = compress(model, optimizer, COMPRESSORS["loco"], scaler=scaler)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            kept = [session.sync.state.export_unsent(name) for name in session.sync.specs]
        if step == 2:
            optimizer.zero_grad()
            session.begin_step(scaler)
            restored = [session.sync.state.export_unsent(name) for name in session.sync.specs]
    sync = session.sync
    return {
        "restored": all(torch.equal(a * 0.5, b) for a, b in zip(kept, restored, strict=True) if a is not None),
        "scale": sync.loss_scale,
        "steps": sync.step_index,
        "skipped": sync.num_skipped,
        "print": fingerprint(net),
        "finite": all(bool(p.isfinite().all()) for p in net.parameters()),
    }


@scenarios(skipped)
def test_a_step_that_a_loss_scaler_skips_is_rolled_back(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["restored"], "in units of the scale that has been halved"
        assert rank["scale"] == 512.0
        assert rank["steps"] == 5
        assert rank["skipped"] == 1
        assert rank["finite"]
    assert facts[0]["print"] == facts[1]["print"]


# -- what is forgotten -------------------------------------------------------------------------------------------------


def forgotten(folder: Path) -> Facts:
    net = mlp()
    prepare(net, LoCo())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model(batch(0)).square().mean().backward()
    early = mlp()
    before = torch.optim.SGD(early.parameters(), lr=0.1)
    sharded = wrap("fsdp", early)
    with torch.device("meta"):
        empty = wrap("fsdp", mlp())
    return {
        "never attached": raised(optimizer.step),
        "made before": raised(lambda: compress(sharded, before)),
        "bare": raised(lambda: compress(mlp(), before)),
        "empty": raised(lambda: compress(empty, torch.optim.SGD(empty.parameters(), lr=0.1))),
        "twice": raised(lambda: compress(DistributedDataParallel(DistributedDataParallel(mlp())), before)),
    }


@scenarios(forgotten)
def test_what_would_train_uncompressed_or_not_at_all_is_an_error(facts: list[Facts]) -> None:
    assert "nothing was attached to it" in facts[0]["never attached"]
    assert "the optimizer steps no parameter of this model" in facts[0]["made before"]
    assert "that nothing synchronizes" in facts[0]["bare"]
    assert "is on the meta device: give the model memory and values" in facts[0]["empty"]
    assert "around a DistributedDataParallel, which also synchronizes: wrap the model once" in facts[0]["twice"]


# -- words -------------------------------------------------------------------------------------------------------------


def told(way: str, net: nn.Module, make: Any) -> tuple[Any, Any, Callable[[], Session], Any, Callable[[], object]]:
    """A model and its optimizer, the session, how to go backward, and what makes the optimizer's state."""
    if way == "fabric":
        launched = launch(with_fabric.LowBitFSDPStrategy(COMPRESSORS["loco"]))
        model = launched.setup_module(net)
        optimizer = launched.setup_optimizers(make(net.parameters()))
        strategy: Any = launched.strategy
        return model, optimizer, lambda: strategy.sessions[0], launched.backward, partial(_state, model, optimizer)
    if way == "accelerate":
        fresh_state()
        plugin = LowBitPlugin(COMPRESSORS["loco"])
        accelerator = LowBitAccelerator(lowbit_plugin=plugin, fsdp_plugin=fsdp_plugin("Linear"))
        model, optimizer = accelerator.prepare(net, make(net.parameters()))
        binding: Any = binding_of(accelerator)
        return model, optimizer, lambda: binding.sessions[0], accelerator.backward, partial(_state, model, optimizer)
    model, options = wrap(way.removeprefix("local "), net), {"outer": LocalSGD(every=2)} if "local" in way else {}
    optimizer = make(net.parameters())
    session = compress(model, optimizer, COMPRESSORS["loco"], **options)
    alone = "ddp" in way  # stock waits for nobody
    save = partial(_state, model, optimizer) if not alone or dist.get_rank() == 0 else lambda: None
    return model, optimizer, lambda: session, Tensor.backward, save


def _state(model: Any, optimizer: Any) -> object:
    return get_optimizer_state_dict(model, optimizer)


MOMENTUM = {"none": 0.0, "some": 0.9}  # without, torch makes the state each time


def state_is_made(folder: Path, way: str, momentum: str) -> Facts:
    """Its state is asked for while it has none, which torch makes by stepping the optimizer; or is not."""

    def run(asks: bool) -> tuple[list[Tensor], list[Tensor], int]:
        torch.manual_seed(0)
        net = mlp()
        make = partial(torch.optim.SGD, lr=0.1, momentum=MOMENTUM[momentum])
        model, optimizer, session, backward, save = told(way, net, make)
        for step in range(5):
            for loss_of in (100, 1):  # the former is thrown away
                if asks and momentum == "none":
                    save()
                backward(loss_of * model(batch(step)).square().mean())
                if loss_of == 1:
                    optimizer.step()
                optimizer.zero_grad()
                if asks:
                    save()
        sync = session().sync
        state = [tensor.clone() for tensor in sync.state.all_tensors()]
        session().finish()
        return local_values(net.parameters()), state, sync.step_index

    with listen() as lines:
        (asked, asked_state, asked_steps), (never, never_state, steps) = run(True), run(False)
    return {
        "weights": all(map(torch.equal, asked, never)),
        "state": all(map(torch.equal, asked_state, never_state)),
        "steps": (asked_steps, steps),
        "lines": [line for line in lines if "has stepped" in line],
    }


@scenarios(
    state_is_made,
    way=("ddp", "fsdp", "local ddp", "fabric", "accelerate"),
    momentum=tuple(MOMENTUM),
    slow=lambda way, momentum, **_: momentum == "none" and way not in ("ddp", "fsdp"),
)
def test_a_step_that_torch_takes_to_make_state_is_none(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == {"weights": True, "state": True, "steps": (5, 5), "lines": []}


class Failing(StepListener):
    """Looks at buckets and fails."""

    traces = False

    def begin_step(self) -> Failing:
        return self

    def end_step(self, *, counted: bool) -> None:
        """Nothing."""

    def trace(self, name: str, compensated: Tensor, sent: Tensor) -> None:
        """Nothing."""

    def observe(self, bucket: Any, x: Tensor, out: Tensor, stages: Any) -> Any:
        yield from stages
        raise ValueError("the words of an error")


def failing(folder: Path) -> Facts:
    net = mlp()
    model = wrap("ddp", net)
    session = compress(model, torch.optim.SGD(net.parameters(), lr=0.1), COMPRESSORS["loco"])
    session.sync.listeners.add(Failing(), StepPhase.OBSERVE)
    error = raised(lambda: model(batch(0)).square().mean().backward())
    session.close()
    return {"error": error}


@scenarios(failing)
def test_an_error_in_the_thread_that_reduces_is_told_in_its_own_words(facts: list[Facts]) -> None:
    assert "the words of an error" in facts[0]["error"]
    assert "Unable to cast" not in facts[0]["error"]
