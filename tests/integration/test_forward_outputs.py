"""`compress` begins a step in every backward pass: in eval mode too, and with any output of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.custom_loop import compress
from testing.processes.scenarios import Facts, all_but, scenarios
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
