"""Modules of every kind through the Trainer: idle, tied, frozen, compiled, sharded by hand; on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lowbit_strategy import LoCo
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.comparing import fingerprint, full_parameters
from testing.training.regression import KINDS, Kind, Regression, fit, loader, mlp, strategy, trainer


def _unused_options(kind: Kind) -> dict[str, Any]:
    return {"find_unused_parameters": True} if kind == "ddp" else {}


class Experts(Regression):
    """A mixture of experts: ranks choose differently, one expert idles on all ranks at first, another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8)) for _ in range(3))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        chosen = (self.steps + self.global_rank) % 2 if self.steps < 4 else 2
        self.steps += 1
        return out + self.experts[chosen](out)


def experts(folder: Path, kind: Kind) -> Facts:
    model = Experts()
    before = {name: value.clone() for name, value in model.named_parameters()}
    fit(kind, model, options=_unused_options(kind), max_steps=8)
    moved = {name for name, value in full_parameters(model).items() if not torch.equal(value, before[name])}
    return {"print": fingerprint(model), "moved": len(moved), "parameters": len(before)}


@scenarios(experts, kind=KINDS)
def test_experts_that_idle_on_some_ranks(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["moved"] == facts[0]["parameters"]


class Adversaries(L.LightningModule):
    """Two optimizers, manual optimization, clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        self._step(first, -self.critic(self.generator(x)).mean())
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self._step(second, self.critic(torch.cat([self.generator(x).detach(), -x])).mean())
        self.untoggle_optimizer(second)

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.SGD(self.critic.parameters(), lr=0.01)]


def two_optimizers(folder: Path, kind: Kind) -> Facts:
    changes = {}
    for compressor in (None, LoCo(bits=8, block_size=32)):
        torch.manual_seed(0)
        model = Adversaries()
        before = [value.clone() for value in model.parameters()]
        chosen = (
            strategy(kind, compressor, **_unused_options(kind)) if compressor else "ddp_find_unused_parameters_true"
        )
        made = trainer(chosen, max_steps=10)
        made.fit(model, loader())
        moved = [(a - b).flatten() for a, b in zip(full_parameters(model).values(), before, strict=True)]
        changes["ours" if compressor else "stock"] = torch.cat(moved)
    change, stock = changes["ours"], changes["stock"]
    return {
        "print": fingerprint(model),
        "steps": made.strategy.sync.step_index,
        "similarity": torch.cosine_similarity(change, stock, dim=0).item(),
        "length": (change.norm() / stock.norm()).item(),
    }


@scenarios(two_optimizers, kind=KINDS)
def test_two_optimizers_with_manual_optimization(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 10
    assert facts[0]["similarity"] > 0.98
    assert facts[0]["length"] == pytest.approx(1, abs=0.05)


class Manual(Regression):
    """A parameter of its own, and manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(1))


def manual_bare(folder: Path) -> Facts:
    return {"error": raised(lambda: fit("fsdp", Manual()))}


@scenarios(manual_bare)
def test_manual_optimization_with_a_bare_parameter_is_refused_under_fsdp(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["error"].startswith("ValueError: parameter scale belongs to the module itself: with manual")


class Shapes(Regression):
    """Tied weights, bare parameters, odd shapes."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 16)
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.one = nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.full((3, 5, 7), 0.01))
        self.grid = nn.Parameter(torch.full((37, 41), 0.01))
        self.temperature = nn.Parameter(torch.tensor(1.0)) if scalar else 1.0

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 50).long().clamp(max=299)
        out = self.net(x) * self.one * self.temperature + self.cube.sum() * self.grid.sum() / 1000
        return out + self.head(self.embedding(tokens).mean(1))[:, :8]


def shapes(folder: Path, kind: Kind) -> Facts:
    model = Shapes(scalar=kind == "ddp")
    before = {name: value.clone() for name, value in model.named_parameters()}
    made = fit(kind, model, max_steps=4)
    moved = {name for name, value in full_parameters(model).items() if not torch.equal(value, before[name])}
    return {
        "print": fingerprint(model),
        "still": sorted(before.keys() - moved),
        "tied": model.head.weight is model.embedding.weight,
        "kinds": {name: assignment.kind for name, assignment in made.strategy.sync.state.assignments.items()},
    }


@scenarios(shapes, kind=KINDS)
def test_parameters_of_every_shape(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["still"] == []
    assert facts[0]["tied"]
    assert facts[0]["kinds"]["embedding.weight"] == "high_precision"
    assert facts[0]["kinds"]["grid"] == "compressed"
    assert facts[0]["kinds"]["cube"] == facts[0]["kinds"]["one"] == "exempt"


def scalar_sharded(folder: Path) -> Facts:
    return {"error": raised(lambda: fit("fsdp", Shapes(scalar=True)))}


@scenarios(scalar_sharded)
def test_fsdp_says_which_parameter_is_a_scalar(facts: list[Facts]) -> None:
    for rank in facts:
        assert "temperature" in rank["error"]
        assert "1D tensor" in rank["error"]


class _Unfreeze(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.net[0].parameters())})


def unfreezing(folder: Path, kind: Kind) -> Facts:
    seen: Facts = {}
    for callbacks in ([], [_Unfreeze()]):
        model = Regression()
        model.net[0].requires_grad_(False)
        before = model.net[0].weight.clone()
        made = fit(kind, model, max_steps=8, callbacks=callbacks)
        sync, moved = made.strategy.sync, not torch.equal(full_parameters(model)["net.0.weight"], before)
        known = "net.0.weight" in sync.specs
        seen["thawed" if callbacks else "frozen"] = {"moved": moved, "known": known, "steps": sync.step_index}
    seen["residual"] = all(bool(sync.state.residual(name).any()) for name in ("net.0.weight", "net.2.weight"))
    return seen | {"print": fingerprint(model)}


@scenarios(unfreezing, kind=KINDS)
def test_parameters_frozen_at_first_are_synchronized_once_they_are_trained(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert rank["frozen"] == {"moved": False, "known": False, "steps": 8}
        assert rank["thawed"] == {"moved": True, "known": True, "steps": 8}
        assert rank["residual"]


class Compiled(Regression):
    """The inner model is compiled as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="aot_eager")


def _compiled_submodule() -> Regression:
    model = Regression()
    model.net[2] = torch.compile(model.net[2], backend="aot_eager")
    return model


_COMPILED = {"submodule": _compiled_submodule, "inner": Compiled}


def compiled(folder: Path, kind: Kind, what: str) -> Facts:
    facts: Facts = {}
    for name, build in {"compiled": _COMPILED[what], "eager": Regression}.items():
        torch.manual_seed(0)
        model = build()
        with count_exchanges() as sizes:
            made = trainer(f"loco_{kind}", max_steps=3)
            made.fit(model, loader())
        names = sorted(made.strategy.sync.specs)
        facts[name] = {"print": fingerprint(model), "exchanges": len(sizes), "names": names}
    return facts


@pytest.mark.slow
@scenarios(compiled, kind=KINDS, what=("submodule", "inner"))
def test_compiled_parts_give_the_same_bits_under_the_same_names(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["compiled"] == rank["eager"] == facts[0]["eager"]
        assert rank["compiled"]["exchanges"] >= 3


def compiled_whole(folder: Path) -> Facts:
    model = torch.compile(Regression(), backend="aot_eager")
    with count_exchanges() as sizes:
        trainer("loco_ddp", max_steps=3).fit(model, loader())
    refused = raised(lambda: trainer("loco_fsdp").fit(torch.compile(Regression(), backend="aot_eager"), loader()))
    return {"print": fingerprint(model), "calls": len(sizes), "refused": refused}


@pytest.mark.slow
@scenarios(compiled_whole)
def test_compiled_lightning_module(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["calls"] >= 3
    assert "compiled model is incompatible with the current strategy: `LowBitFSDPStrategy`" in facts[0]["refused"]


class Sharded(Regression):
    """Shards its parts in ``configure_model``, as Lightning's own strategy for FSDP2 wants it."""

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__()
        self.whole = whole

    def configure_model(self) -> None:
        if isinstance(self.net[2], FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[2], mesh=mesh)
        if self.whole:
            fully_shard(self.net, mesh=mesh)


def own_sharding(folder: Path) -> Facts:
    model = Sharded()
    with count_exchanges() as sizes:
        fit("fsdp", model, max_steps=3, accumulate_grad_batches=2)
    return {
        "print": fingerprint(model),
        "calls": len(sizes),
        "partly": raised(lambda: fit("fsdp", Sharded(whole=False))),
    }


@scenarios(own_sharding)
def test_a_module_that_shards_itself(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["calls"] == 6
    assert "nothing synchronizes net.0.weight, net.0.bias, net.4.weight and 1 more:" in facts[0]["partly"]


def on_meta(folder: Path) -> Facts:
    with torch.device("meta"):
        net = mlp()
    model = Regression(net)
    fit("fsdp", model, max_steps=20)
    with torch.device("meta"):
        model_without = Regression(nn.Sequential(nn.Linear(16, 8), _NoReset()))
    return {
        "print": fingerprint(model),
        "losses": model.losses,
        "refused": raised(lambda: fit("fsdp", model_without)),
    }


class _NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@scenarios(on_meta)
def test_parameters_on_the_meta_device(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    for rank in facts:
        assert rank["losses"][-1] < rank["losses"][0]
        assert "net.1 (_NoReset) is on the meta device and has no reset_parameters()" in rank["refused"]


class Idle(Regression):
    """Two of its parameters have no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 300)


def idle(folder: Path) -> Facts:
    with listen() as logged:
        error = raised(lambda: fit("ddp", Idle(), max_steps=4))
    torch.distributed.destroy_process_group()  # nothing can be relied on after DDP's error: the next scenario makes one
    return {"error": error, "logged": logged}


@scenarios(idle)
def test_unused_parameters_are_named_with_the_remedy(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert 'use Trainer(strategy="loco_ddp_find_unused_parameters_true")' in rank["error"]
        assert "LowBitDDPStrategy(..., find_unused_parameters=True)" in rank["error"]
        assert "strategy='ddp_find_unused_parameters_true'" not in rank["error"]  # Lightning's own, uncompressed
        (diagnosis,) = [line for line in rank["logged"] if line.startswith(f"rank {number}: ")]
        assert "the loss does not depend on extra.weight, extra.bias, and DDP waits" in diagnosis


def idle_by_name(folder: Path) -> Facts:
    model = Idle()
    made = trainer("loco_ddp_find_unused_parameters_true", max_steps=4)
    made.fit(model, loader())
    sync = made.strategy.sync
    return {"steps": sync.step_index, "sent": sync.ranks.peers.sent_nbytes, "print": fingerprint(model)}


@scenarios(idle_by_name)
def test_unused_parameters_are_served_by_a_registered_name(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 4
    assert facts[0]["sent"] > 0
