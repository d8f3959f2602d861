"""`compress` begins a step in every backward pass: in eval mode too, and with any output of the model."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.control import Accordion
from lowbit_strategy.custom_loop import adapt, compress
from testing.processes.scenarios import Facts, all_but, none, scenarios
from testing.training.comparing import fingerprint


@dataclass
class Output:
    loss: Tensor


class Bare:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Kept(nn.Module):
    """Two layers; `form` makes what forward returns of its loss, which it also keeps."""

    def __init__(self, form: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.second, self.form = nn.Linear(64, 64), nn.Linear(64, 64), form

    def forward(self, x: Tensor) -> object:
        self.loss = (self.second(self.first(x).tanh()) - 1).square().mean()
        return self.form(self.loss)


FORMS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda loss: loss,
    "dataclass": Output,
    "distribution": lambda loss: Normal(loss, 1.0),
    "object": Bare,
    "generator": lambda loss: (each for each in [loss]),
    "nothing": lambda loss: None,
}


def _train(kind: str, form: str, compressor: str | None, *, evaluates: bool) -> tuple[int, float]:
    torch.manual_seed(1)
    net = Kept(FORMS[form])
    model: Any = net
    if kind == "fsdp":
        for layer in (net.first, net.second):
            fully_shard(layer)
        fully_shard(net)
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    session = None if compressor is None else compress(model, optimizer, compressor)
    model.train(not evaluates)
    for step in range(5):
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())))
        net.loss.backward()
        if step != 2:  # gradients are cleared without a step, after which a reduction is rolled back
            optimizer.step()
        optimizer.zero_grad()
    sent = 0.0 if session is None else session.sync.ranks.peers.sent_nbytes
    if session is not None:
        session.close()
    return fingerprint(net), sent


def outputs(folder: Path, kind: str, form: str, evaluates: bool) -> Facts:
    return {
        "stock": _train(kind, form, None, evaluates=evaluates),
        "dense": _train(kind, form, "dense", evaluates=evaluates),
        "loco": _train(kind, form, "loco", evaluates=evaluates),
        "usual": _train(kind, "tensor", "loco", evaluates=evaluates and kind == "fsdp"),  # eval gathers exact weights
    }


@scenarios(outputs, kind=("ddp", "fsdp"), form=tuple(FORMS), evaluates=(False, True), slow=all_but(evaluates=True))
def test_trains_as_with_a_tensor_in_training_mode(facts: list[Facts]) -> None:
    """After a skipped step too: the step begins before gradients are added."""
    for found in facts:
        assert found["dense"][0] == found["stock"][0]
        assert found["loco"] == found["usual"]
        assert found["loco"][0] != found["stock"][0]
        assert found["loco"] == facts[0]["loco"]


class TwoMethods(nn.Module):
    """Trained through `encode`; `forward` keeps what the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def encode(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.encode(x)
        return self.kept * 2


def _by_other_ways(how: str, compressor: str | None) -> int:
    torch.manual_seed(1)
    net = TwoMethods()
    model: Any = net
    if how == "attribute":
        model = DistributedDataParallel(net)
    else:
        fully_shard(net.first)
        fully_shard(net)
        register_fsdp_forward_method(net, "encode")
    params = list(net.parameters())
    in_backward = how == "optimizer in backward"
    optimizers = [
        torch.optim.SGD(part, lr=0.05) for part in ([[param] for param in params] if in_backward else [params])
    ]
    if compressor is not None:
        compress(model, optimizers, compressor)  # and the session is not kept
        gc.collect()
    if in_backward:

        def step(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for param, optimizer in zip(params, optimizers, strict=True):
            param.register_post_accumulate_grad_hook(functools.partial(step, optimizer))
    for number in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + torch.distributed.get_rank()))
        if how == "attribute":
            model(x)
        out = net.kept if how == "attribute" else model(x) if in_backward else net.encode(x)
        (out - 1).square().mean().backward()
        if not in_backward:
            optimizers[0].step()
            optimizers[0].zero_grad()
    return fingerprint(net)


def other_ways(folder: Path, how: str) -> Facts:
    return {str(compressor): _by_other_ways(how, compressor) for compressor in (None, "dense", "loco", "topk")}


@scenarios(other_ways, how=("attribute", "forward method", "optimizer in backward"), slow=none)
def test_a_step_begins_whatever_way_the_loss_was_reached(facts: list[Facts]) -> None:
    for found in facts:
        assert found["dense"] == found["None"]
        assert found["loco"] != found["None"]
        assert found == facts[0]


def alone(folder: Path) -> Facts:
    """Rank 0 asks for gradients past DDP, which stock synchronizes with nobody, between steps at which controllers
    decide together.
    """
    prints = []
    for asks in (False, True):
        torch.manual_seed(1)
        net = TwoMethods()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model = DistributedDataParallel(net)
        session = compress(model, optimizer, "loco")
        levels = LoCo(bits=8), LoCo(bits=2)
        adapt(session.sync, Accordion(light=levels[0], heavy=levels[1], interval=2, unit="steps"))
        for step in range(5):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank()))
            if asks and torch.distributed.get_rank() == 0:
                net(x).square().mean().backward()
                optimizer.zero_grad()
            torch.distributed.barrier()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        prints.append((fingerprint(net), session.sync.step_index))
    return {"prints": prints}


@scenarios(alone)
def test_a_backward_pass_of_one_rank_alone_waits_for_nobody(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["prints"][0] == rank["prints"][1]
        assert rank == facts[0]
