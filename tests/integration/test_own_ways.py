"""Loops and optimizers that have a way of their own of training locally: refused in words, before anything is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LocalSGD, LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, compress, prepare
from lowbit_strategy.lightning import LowBitDDPStrategy
from testing.log import listen
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.regression import WIDTH, Regression, loader, mlp, trainer


class ScheduleFree(torch.optim.SGD):
    """Has other weights for validation than for training."""

    def train(self) -> None:
        """Put those that are trained in."""

    def eval(self) -> None:
        """Put their average in."""


class Model(Regression):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), lr=0.1)


def _accelerated(**options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    LowBitPlugin(LoCo(block_size=32), **options).attach(accelerator)
    model = mlp()
    make = ScheduleFree if options else torch.optim.SGD
    return accelerator, *accelerator.prepare(model, make(model.parameters(), lr=0.1))


def _custom(options: SyncOptions, make: Any, *, synchronizes: bool) -> None:
    model = mlp()
    prepared = prepare(model, LoCo(block_size=32), options)
    ddp = DistributedDataParallel(model)
    session = attach_ddp(ddp, prepared)
    optimizer = make(model.parameters(), lr=0.1)
    try:
        for _ in range(2):
            session.begin_step()
            ddp.require_backward_grad_sync = synchronizes
            ddp(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            session.end_step(optimizer)
    finally:
        session.close()


def refused(folder: Path) -> Facts:
    def own_local_sgd() -> None:
        accelerator, model, optimizer = _accelerated()
        with AccelerateLocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
            accelerator.backward(model(torch.randn(4, WIDTH)).square().mean())
            optimizer.step()
            local.step()

    outer = LocalSGD(every=2)
    lightning = trainer(LowBitDDPStrategy(LoCo(block_size=32), outer=outer), max_steps=2)
    return {
        "accelerate": raised(own_local_sgd),
        "no_sync": raised(lambda: _custom(SyncOptions(), torch.optim.SGD, synchronizes=False)),
        "free under lightning": raised(lambda: lightning.fit(Model(), loader())),
        "free under accelerate": raised(lambda: _accelerated(outer=outer)),
        "free in a loop": raised(lambda: _custom(SyncOptions(outer=outer), ScheduleFree, synchronizes=True)),
        "free without outer": raised(lambda: _custom(SyncOptions(), ScheduleFree, synchronizes=True)),
        "squares in a loop": raised(
            lambda: _custom(SyncOptions(second_moment=True), torch.optim.SGD, synchronizes=True)
        ),
        "steps": lightning.global_step,
    }


@scenarios(refused)
def test_what_trains_locally_in_its_own_way_is_named(facts: list[Facts]) -> None:
    for rank in facts:
        for loop in ("accelerate", "no_sync"):
            assert "stepped inside no_sync()" in rank[loop]
            assert "outer=LocalSGD(every=8)" in rank[loop]
        for loop in ("lightning", "accelerate"):
            assert "ScheduleFree exchanges the model's weights" in rank[f"free under {loop}"]
        assert "ScheduleFree exchanges the model's weights" in rank["free in a loop"]
        assert rank["free without outer"] == ""
        assert "second_moment=True" in rank["squares in a loop"]
        assert rank["steps"] == 0


def by_default(folder: Path) -> Facts:
    """No compressor is given."""
    model, rule = DistributedDataParallel(mlp()), LocalSGD(every=2)
    session = compress(model, torch.optim.SGD(model.parameters(), lr=0.1), outer=rule)
    facts = {"as the rule has it": session.sync.compressor == rule.compressor()}
    session.close()
    return facts


@scenarios(by_default)
def test_a_rule_brings_its_compressor_to_a_loop(facts: list[Facts]) -> None:
    assert all(rank["as the rule has it"] for rank in facts)


def bypassed(folder: Path) -> Facts:
    """The loss goes past DDP, so that nothing is synchronized."""
    accelerator, model, optimizer = _accelerated()
    with listen() as logged:
        for _ in range(2):
            accelerator.backward(accelerator.unwrap_model(model)(torch.randn(4, WIDTH)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return {"said": sum("no gradient has been synchronized yet" in text for text in logged)}


@scenarios(bypassed)
def test_a_first_step_without_synchronization_is_warned_of(facts: list[Facts]) -> None:
    assert [rank["said"] for rank in facts] == [1, 1]


def stepped_in_backward(folder: Path) -> Facts:
    """Hooks of parameters step before DDP has averaged their gradients."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    model = DistributedDataParallel(net)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in net.parameters()}
    compress(model, optimizers.values(), "loco")
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    return {"error": raised(lambda: model(torch.randn(4, WIDTH)).square().mean().backward())}


@scenarios(stepped_in_backward)
def test_an_optimizer_that_steps_in_backward_is_refused_under_ddp(facts: list[Facts]) -> None:
    assert all("stepped inside the backward pass" in rank["error"] for rank in facts)
