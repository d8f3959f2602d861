"""Parameters that get another name in mid-run: they are pruned, parametrized, or a module is put around their layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from lowbit_strategy import DiLoCo, LoCo
from lowbit_strategy.custom_loop import compress
from testing.log import listen
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import fingerprint
from testing.training.plain import batch, local_values, wrap
from testing.training.regression import Regression, loader, mlp, trainer

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "loco": (LoCo(block_size=32), {}),
    "diloco": (LoCo(block_size=32), {"outer": DiLoCo(every=3)}),
}


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def change(net: nn.Sequential, how: str) -> None:
    if how == "prune":
        prune.random_unstructured(net[2], "weight", 0.3)
        prune.custom_from_mask(net[2], "weight", torch.arange(64).remainder(3).ne(0).expand(64, 64))
    elif how == "parametrize":
        parametrize.register_parametrization(net[2], "weight", Doubled())
    elif how == "swap":
        net[0].bias, net[2].bias = net[2].bias, net[0].bias
    else:
        net[2] = Around(net[2])


def renamed(folder: Path, case: tuple[str, str, str]) -> Facts:
    kind, method, how = case

    def made(compressed: bool) -> tuple[nn.Sequential, Any, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        net = mlp()
        model = wrap(kind, net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        compressor, options = METHODS[method]
        return net, model, optimizer, compress(model, optimizer, compressor, **options) if compressed else None

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    def run(compressed: bool) -> tuple[list[Tensor], Any]:
        net, model, optimizer, session = made(compressed)
        train(model, optimizer, range(4))
        torch.manual_seed(1)
        change(net, how)
        train(model, optimizer, range(4, 6))
        if session is not None:
            with session.save(folder / "model.ckpt") as stamp:
                saved = copy.deepcopy((list(net.state_dict().values()), optimizer.state_dict(), stamp))
        train(model, optimizer, range(6, 10))
        names = list(session.sync.specs) if session is not None else []
        if session is not None:
            session.finish()
            return local_values(net.parameters()), (*saved, names)
        return local_values(net.parameters()), None

    def resumed(values: list[Tensor], optimizer_state: Any, stamp: Any) -> list[Tensor]:
        net, model, optimizer, session = made(True)
        change(net, how)
        net.load_state_dict(dict(zip(net.state_dict(), values, strict=True)))
        optimizer.load_state_dict(optimizer_state)
        session.load(folder / "model.ckpt", stamp)
        session.resume()
        train(model, optimizer, range(6, 10))
        session.finish()
        return local_values(net.parameters())

    with listen() as lines:
        weights, (*saved, names) = run(True)
        again = resumed(*saved)
    return {
        "same": all(map(torch.equal, weights, again)),
        "stock": method != "dense" or all(map(torch.equal, weights, run(False)[0])),
        "names": sorted(names) == sorted(name for name, _ in mlp().named_parameters()),
        "sums": [float(x.double().sum()) for x in weights] if kind == "ddp" else None,
        "lines": [line for line in lines if "more parameters are" in line or "no longer" in line],
    }


@scenarios(
    renamed,
    case=(
        ("ddp", "dense", "prune"),
        ("ddp", "loco", "wrap"),
        ("ddp", "loco", "swap"),
        ("ddp", "diloco", "prune"),
        ("fsdp", "dense", "wrap"),
    ),
)
def test_training_goes_on_under_the_names_of_set_up(facts: list[Facts]) -> None:
    assert facts[0]["sums"] == facts[1]["sums"]
    for rank in facts:
        assert rank["same"]
        assert rank["stock"]
        assert rank["names"]
        assert not rank["lines"]


def pruned_for_good(folder: Path) -> Facts:
    """Pruning ends with the same object under its first name; a layer that takes another's place is an error."""
    torch.manual_seed(0)
    net = mlp()
    model = wrap("ddp", net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = compress(model, optimizer, "loco")
    for step in range(6):
        if step == 2:
            prune.random_unstructured(net[2], "weight", 0.3)
        if step == 4:
            prune.remove(net[2], "weight")
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    known = list(session.sync.specs)
    net[2] = Around(nn.Linear(64, 64))
    error = ""
    try:
        model(batch(6)).square().mean().backward()
        optimizer.step()
    except RuntimeError as raised:
        error = str(raised)
    return {"known": known, "error": error}


@scenarios(pruned_for_good)
def test_a_parameter_that_gets_its_name_back(facts: list[Facts]) -> None:
    assert facts[0]["known"] == [name for name, _ in mlp().named_parameters()]
    assert all("2.inner.weight is not the parameter that the model had" in rank["error"] for rank in facts)


def pruned_by_lightning(folder: Path) -> Facts:
    found = {}
    for name in ("ddp", "dense_ddp", "loco_ddp"):
        torch.manual_seed(0)
        model = Regression()
        pruning = ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)
        made = trainer(name, max_steps=-1, max_epochs=3, limit_train_batches=3, callbacks=[pruning])
        made.fit(model, loader())
        found[name] = fingerprint(model), float((model.net[0].weight == 0).float().mean())
    return found


@scenarios(pruned_by_lightning)
def test_lightnings_own_pruning(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    for rank in facts:
        assert rank["dense_ddp"] == rank["ddp"]
        assert rank["loco_ddp"][1] > 0.2
