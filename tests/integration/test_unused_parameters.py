"""Under FSDP2 a backward pass gives some parameters no gradient: on some ranks, or on none. Also settings of FSDP2 for
the reduction, which count whenever they are made.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lowbit_strategy.custom_loop import compress
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, scenarios

LAYOUTS: dict[str, dict[str, Any]] = {"flat": {"two_level": False}, "two levels": {}, "hsdp": {"shard_size": 2}}


class Heads(nn.Module):
    """One head is used in a pass; another may be computed, and its output not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.heads = nn.ModuleList(nn.Linear(16, 9) for _ in range(3))

    def forward(self, x: Tensor, which: int, computed: int | None = None) -> Tensor:
        y = self.body(x)
        if computed is not None:
            self.heads[computed](y)
        return torch.as_tensor(self.heads[which](y))


def sharded(layout: str) -> Heads:
    torch.manual_seed(0)
    net = Heads()
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh(
        "cpu", (2, world // 2) if layout == "hsdp" else (world,), mesh_dim_names=("r", "s")[-1 - (layout == "hsdp") :]
    )
    for part in (net.body, net.heads[2], net):
        fully_shard(part, mesh=mesh)
    return net


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor


def train(layout: str, method: str | None) -> Facts:
    net = sharded(layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with nodes_of(2):
        session = compress(net, optimizer, method, **LAYOUTS[layout]) if method else None
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    gradients: list[list[Tensor | None]] = []
    params = list(net.parameters())

    def passes(number: int, which: int, *, reduced: bool = True, **forward: Any) -> None:
        for at in range(number):
            net.set_requires_gradient_sync(reduced and at == number - 1)
            net(torch.randn(4, 16, generator=generator), which, **forward).square().mean().backward()

    for step in range(10):
        optimizer.zero_grad()
        which = step // 3 % 2
        if step == 4:  # a window of accumulation in which both heads had gradients, one of them before the last pass
            passes(1, 1 - which, reduced=False)
        passes(2 if step % 3 == 1 else 1, which, computed=2 if step == 6 else None)
        if step == 5:  # a second backward pass, which has no gradient for what the first one had
            passes(1, 1 - which)
        gradients.append([whole(param.grad) for param in params])
        optimizer.step()
    if session is not None:
        session.finish()
    return {"grads": gradients, "params": [whole(param.detach()) for param in params]}


def same(one: list[Tensor | None], other: list[Tensor | None]) -> list[bool]:
    return [
        a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-4, atol=1e-7)
        for a, b in zip(one, other, strict=True)
    ]


def idle_everywhere(folder: Path, layout: str) -> Facts:
    stock, dense, loco, sparse = (train(layout, method) for method in (None, "dense", "loco", "topk"))
    absent = [[grad is None for grad in grads] for grads in stock["grads"]]
    return {
        "dense": [same(a, b) for a, b in zip(stock["grads"], dense["grads"], strict=True)],
        "params": same(stock["params"], dense["params"]),
        "absent": absent,
        "coded": [[[grad is None for grad in grads] for grads in run["grads"]] for run in (loco, sparse)],
        "bits": [float(p.double().sum()) for p in loco["params"]],
    }


@scenarios(idle_everywhere, world_size=4, layout=tuple(LAYOUTS))
def test_what_no_rank_had_a_gradient_of_has_none(facts: list[Facts]) -> None:
    for rank in facts:
        assert all(map(all, rank["dense"]))
        assert all(rank["params"])
        assert any(map(any, rank["absent"]))
        assert all(coded == rank["absent"] for coded in rank["coded"])
        assert rank["bits"] == facts[0]["bits"]


def child_alone(folder: Path, layout: str) -> Facts:
    """A step through the whole model, and then one through a sharded child alone, with an optimizer that moves what has
    a gradient of zero.
    """
    found = {}
    for method in (None, "dense"):
        net = sharded(layout)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        with nodes_of(2):
            session = compress(net, optimizer, method, **LAYOUTS[layout]) if method else None
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
        for head in (0, None, 1):
            made = net.body(x) if head is None else net(x, head)
            made.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.finish()
        found[method or "stock"] = [whole(param.detach()) for param in net.parameters()]
    return {"same": same(found["stock"], found["dense"])}


@scenarios(child_alone, world_size=4, layout=tuple(LAYOUTS))
def test_a_step_through_a_child_alone(facts: list[Facts]) -> None:
    assert all(all(rank["same"]) for rank in facts)


def idle_on_some_ranks(folder: Path, layout: str) -> Facts:
    net = sharded(layout)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with nodes_of(2):
        session = compress(net, optimizer, "loco", **LAYOUTS[layout])
    rank, found = torch.distributed.get_rank(), []
    called: list[str] = []
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    for step in range(4):
        optimizer.zero_grad()
        called.clear()
        net(
            torch.randn(4, 16), int(rank == step)
        ).square().mean().backward()  # head 1 is used by one rank, head 2 by none
        grads = {name: whole(param.grad) for name, param in net.named_parameters()}
        used = {name for name, grad in grads.items() if grad is not None}
        values = [float(grads[name].abs().sum()) for name in sorted(used) if grads[name] is not None]  # type: ignore[union-attr]
        found.append((sorted(used), values, sorted(called) == sorted(used)))
        optimizer.step()
    session.finish()
    return {"found": found, "params": [float(p.detach().full_tensor().double().sum()) for p in net.parameters()]}


@scenarios(idle_on_some_ranks, world_size=4, layout=tuple(LAYOUTS))
def test_what_one_rank_had_a_gradient_of_has_one_on_all(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank == facts[0]
        for used, values, hooks in rank["found"]:
            assert {"heads.0.weight", "heads.1.weight"} <= set(used)
            assert not any(name.startswith("heads.2") for name in used)
            assert all(value > 0 for value in values)
            assert hooks


def _see(seen: list[float], reduced: Tensor) -> None:
    seen.append(float(reduced.double().abs().sum()))


def settings(folder: Path, layout: str) -> Facts:
    """What FSDP2 divides by, set before, between and after; and a hook of the user's."""
    found = {}
    for method in (None, "dense"):
        net = sharded(layout)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen: list[float] = []
        factors = [8.0, None, 4.0] if method else [None, None, None]
        for module in (net, net.body, net.heads[2]):
            if factors[0] is not None:
                module.set_gradient_divide_factor(factors[0])
        with nodes_of(2):
            session = compress(net, optimizer, method, **LAYOUTS[layout]) if method else None
        norms = []
        for number, factor in enumerate(factors):
            if method and number:
                for group in (module._get_fsdp_state()._fsdp_param_group for module in (net, net.body, net.heads[2])):
                    group.gradient_divide_factor = factor
            if number == 2:
                for module in (net, net.body, net.heads[2]):
                    module.set_all_reduce_hook(functools.partial(_see, seen))
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            net(torch.randn(4, 16, generator=generator), 0).square().mean().backward()
            norms.append(float(net.body[0].weight.grad.full_tensor().double().norm()))
            optimizer.zero_grad()
        if session is not None:
            session.finish()
        found[method or "stock"] = {"norms": norms, "hooked": seen}
    return found


@scenarios(settings, world_size=4, layout=tuple(LAYOUTS))
def test_settings_of_fsdp_count_whenever_they_are_made(facts: list[Facts]) -> None:
    for rank in facts:
        mean = rank["stock"]["norms"][0]
        assert rank["dense"]["norms"] == pytest.approx([mean / 2, mean, mean])  # 4 ranks, divided by 8, 4 and 4
        assert rank["dense"]["hooked"] == pytest.approx(rank["stock"]["hooked"])
        assert rank["dense"]["hooked"]
