"""Ranks whose parameters have come to differ learn it, on all ranks and by name, whatever framework trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.divergence.comparison import Comparison
from lowbit_strategy.fabric import LowBitDDPStrategy
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.accelerated import make, prepared
from testing.training.accelerated import train as train_job
from testing.training.ddp_loop import Loop
from testing.training.hf_trainer import trainer as hf_trainer
from testing.training.regression import BATCH, WIDTH, Regression, dataset, fit, loader, mlp, strategy, trainer

CPU = torch.device("cpu")


def _is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _disturb(param: nn.Parameter) -> None:
    """On one rank, after synchronization: as if its gradient had stayed its own."""
    if _is_last_rank():
        assert param.grad is not None
        param.grad.view(-1)[0] += 1e-3


# -- every framework --------------------------------------------------------------------------------------------------


class _Disturbed(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _disturb(self.net[2].weight)


def _lightning(folder: Path) -> None:
    fit("ddp", _Disturbed(), max_steps=5)


def _fabric(folder: Path) -> None:
    made = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=LowBitDDPStrategy(LoCo(block_size=32)))
    made.launch()
    net = mlp()
    model, optimizer = made.setup(net, torch.optim.Adam(net.parameters()))
    for i in range(5):
        x, y = dataset()[i : i + BATCH]
        optimizer.zero_grad()
        made.backward(F.mse_loss(model(x), y))
        _disturb(net[2].weight)
        optimizer.step()


def _accelerate(folder: Path) -> None:
    job = prepared(make("ddp", LowBitPlugin(LoCo(bits=4))))
    step = job.optimizer.step

    def disturbed_step() -> None:
        _disturb(job.model.module.head.weight)
        step()

    with mock.patch.object(job.optimizer, "step", disturbed_step):
        train_job(job, 5)


def _transformers(folder: Path) -> None:
    from transformers import TrainerCallback

    class Disturb(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            _disturb(dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"])

    made = hf_trainer(folder, "ddp", LoCo(bits=4))
    made.add_callback(Disturb())
    made.train()


_TRAINERS = {
    "lightning": (_lightning, "net.2.weight"),
    "fabric": (_fabric, "2.weight"),
    "accelerate": (_accelerate, "head.weight"),
    "transformers": (_transformers, "model.layers.1.mlp.up_proj.weight"),
}


def disturbed(folder: Path, by: str) -> Facts:
    train, name = _TRAINERS[by]
    return {"error": raised(lambda: train(folder)), "name": name}


@scenarios(disturbed, by=tuple(_TRAINERS))
def test_a_gradient_that_differs_on_one_rank(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["error"].startswith("DivergenceError: after optimizer step 2 the ranks no longer hold the same")
    assert f"parameters: {facts[0]['name']} differs between rank 0; rank 1." in facts[0]["error"]


# -- what is compared, and when ---------------------------------------------------------------------------------------


@contextmanager
def _comparisons() -> Iterator[list[int]]:
    """The steps after which parameters were compared."""
    steps, compare = [], Comparison.compare

    def counted(self: Comparison, step_index: int) -> None:
        steps.append(step_index)
        compare(self, step_index)

    with mock.patch.object(Comparison, "compare", counted):
        yield steps


def named(folder: Path) -> Facts:
    """Two parameters of the second of three ranks; at any of the chosen steps; both without a gradient."""
    loop = Loop(mlp())
    with _comparisons() as steps:
        for _ in range(9):
            loop.step()
    if dist.get_rank() == 1:
        with torch.no_grad():
            loop.net[2].bias[5] += 1e-6
            loop.net[4].weight[0, 0] += 1e-6
    return {"steps": steps, "error": raised(loop.step)}


@scenarios(named, world_size=3)
def test_the_first_parameter_and_the_ranks_are_named(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["steps"] == [2]
        assert "after optimizer step 10 " in rank["error"]
        assert "parameters: 2.bias and 1 more parameter differ between ranks 0, 2; rank 1." in rank["error"]


def agreed(folder: Path) -> Facts:
    """Statistics of BatchNorm differ between ranks, and so may what DDP ignores."""
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    net.register_parameter("own", nn.Parameter(torch.full((3,), float(dist.get_rank())), requires_grad=False))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own"])
    loop = Loop(net, broadcast_buffers=False)
    sent = []
    with _comparisons() as steps:
        for _ in range(3):
            before = loop.session.sync.ranks.peers.sent_nbytes
            loop.step()
            sent.append(loop.session.sync.ranks.peers.sent_nbytes - before)
    off = Loop(mlp(), options=SyncOptions(check_digest=False))
    with torch.no_grad():
        off.net[0].weight += dist.get_rank()
    with _comparisons() as none:
        for _ in range(3):
            off.step()
    return {"steps": steps, "sent": len(set(sent)), "off": none, "statistics": net[1].running_mean.tolist()}


@scenarios(agreed)
def test_what_may_differ_is_not_compared(facts: list[Facts]) -> None:
    assert facts[0]["statistics"] != facts[1]["statistics"]
    for rank in facts:
        assert rank["steps"] == [2]
        assert rank["sent"] == 1  # the count of gradients' bytes knows nothing of it
        assert rank["off"] == []


def sharded(folder: Path) -> Facts:
    """Each element has one owner: there is nothing that could differ."""
    with _comparisons() as steps:
        made = trainer(strategy("fsdp"), max_steps=3)
        made.fit(Regression(), loader())
    return {"steps": steps, "step_index": made.strategy.sync.step_index}


@scenarios(sharded)
def test_under_fsdp2_nothing_is_compared(facts: list[Facts]) -> None:
    assert facts[0] == {"steps": [], "step_index": 3}
