"""Models on a mesh of several dims: gradients are compressed over the data-parallel ones, read from the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Dense, LoCo
from lowbit_strategy.custom_loop import Session, compress
from testing.processes.scenarios import Facts, all_but, scenarios

WIDTH = 32
LOCO = LoCo(block_size=32, exempt=())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(2)])


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@dataclass
class Run:
    """A model as its users wrap it, and what comes of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh  # of the data-parallel dims

    def train(self, session: Session | None, num_steps: int, start: int = 0) -> list[float]:
        losses = []
        for step in range(start, start + num_steps):
            generator = torch.Generator().manual_seed(100 * step + place_in(self.mesh))
            x = torch.randn(8, WIDTH, generator=generator)
            loss = (self.model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self) -> list[Tensor]:
        """This rank's parts."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return [(param.to_local() if isinstance(param, DTensor) else param).detach().clone() for param in params]


def place_in(mesh: DeviceMesh) -> int:
    return mesh.mesh.flatten().tolist().index(dist.get_rank())


def wrapped(layout: str) -> Run:
    """Tensor parallelism over 2 of 4 ranks, and the other dim as `layout` says; or a context dim within FSDP2's."""
    model = net()
    if layout == "cp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        dims = mesh["dp", "cp"]._flatten("dp_cp")
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        dims = mesh["replicate", "shard"]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dims = mesh["dp"]
    if layout != "cp":
        tensor_parallel(model, mesh["tp"])
    outer: nn.Module = model
    if layout == "ddp":
        outer = DistributedDataParallel(model, device_mesh=dims)
    else:
        for part in (*model, model):
            fully_shard(part, mesh=dims)
    return Run(outer, torch.optim.AdamW(outer.parameters(), lr=1e-2), dims)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


LAYOUTS = ("fsdp", "hsdp", "ddp", "cp")


def beside_stock(folder: Path, layout: str) -> Facts:
    """Stock, dense and LoCo."""
    weights, losses, planned = {}, {}, {}
    ways: dict[str, Any] = {"stock": None, "dense": Dense(), "loco": LOCO, "coded": LOCO}
    for way, compressor in ways.items():
        run, session = wrapped(layout), None
        if compressor is not None:
            options = {} if layout == "ddp" or way == "coded" else {"weights": "exact"}
            session = compress(run.model, run.optimizer, compressor, **options)
            planned[way] = session.sync.plan().sent_nbytes
            before = session.sync.ranks.peers.sent_nbytes
        losses[way] = run.train(session, 5)
        weights[way] = run.weights()
        if session is not None:
            counted = session.sync.ranks.peers.sent_nbytes - before
            facts = session.sync.ranks.topology, session.sync.ranks.world.world_size
            session.close()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (run.mesh.mesh.flatten().tolist(), weights["loco"]))
    return {
        "dense": equal(weights["stock"], weights["dense"]),
        "losses": losses,
        "bytes": (counted, 5 * planned["coded"]),
        "ranks": facts,
        "sharded": layout in ("fsdp", "cp"),
        "everyone": everyone,
    }


@scenarios(beside_stock, world_size=4, layout=LAYOUTS, slow=all_but(layout=LAYOUTS))
def test_beside_stock(facts: list[Facts]) -> None:
    for rank, each in enumerate(facts):
        few = len(each["everyone"][rank][0]) == 2  # of more ranks gloo adds in another order
        assert each["losses"]["dense"] == pytest.approx(each["losses"]["stock"], rel=0.0 if few else 1e-6)
        assert each["dense"] or not few
        for way in ("loco", "coded"):
            assert abs(each["losses"][way][-1] / each["losses"]["stock"][-1] - 1) < 0.02
        counted, planned = each["bytes"]
        assert planned <= counted <= 1.1 * planned + 16 * 100
        topology, num_all = each["ranks"]
        members, _ = each["everyone"][rank]
        assert (topology.world_size, num_all) == (len(members), 4)
        _, own = each["everyone"][rank]
        if not each["sharded"]:
            assert all(equal(own, each["everyone"][other][1]) for other in members)
        if few:  # a norm, which tensor parallelism replicates
            assert torch.equal(own[0], each["everyone"][rank ^ 1][1][0])
