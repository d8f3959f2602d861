"""A small model on a mesh of several dims, wrapped as its users wrap it, and its training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.custom_loop import Session
from lowbit_strategy.engine.method_state import sum_of_known

WIDTH = 32
LOCO = LoCo(block_size=32, exempt=())
LAYOUTS = ("fsdp", "hsdp", "ddp", "cp")


class Block(nn.Module):
    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def net(hidden: int = 2 * WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden) for _ in range(2)])


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh, *, norms: bool = False) -> None:
    """`norms`: they are on the mesh as well, replicated."""
    for block in model:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        if norms:
            assert isinstance(block, Block)
            distribute_module(block.norm, mesh, input_fn=_replicated, output_fn=_local)


def _replicated(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def _local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


@dataclass
class Run:
    """A model as its users wrap it, and what comes of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh  # of the data-parallel dims

    def train(
        self,
        session: Session | None,
        num_steps: int,
        start: int = 0,
        *,
        batches: int = 1,
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """The losses; `batches` are accumulated."""
        losses = []
        for step in range(start, start + num_steps):
            for batch in range(batches):
                seed = 1000 * batch + 100 * step + place_in(self.mesh)
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
                with synchronizing(self.model, on=batch == batches - 1):
                    loss = (self.model(x) - x.roll(1, 1)).square().mean()
                    (loss / batches).backward()
                losses.append(loss.item())
            before_step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            after_step()
        return losses

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, WIDTH))
        self.model.train()

    def params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def weights(self) -> list[Tensor]:
        """This rank's parts."""
        return [local(param).detach().clone() for param in self.params()]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def synchronizing(model: nn.Module, *, on: bool) -> Iterator[None]:
    """Whether gradients are reduced inside."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if on else model.no_sync():
            yield
        return
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(on, recurse=False)
    yield


def place_in(mesh: DeviceMesh) -> int:
    place: int = mesh.mesh.flatten().tolist().index(dist.get_rank())
    return place


def wrapped(layout: str, *, outermost: str = "dp", hidden: int = 2 * WIDTH, norms: bool = False) -> Run:
    """Tensor parallelism over 2 of all ranks, and the other dim as `layout` says; or a context dim within FSDP2's.

    Args:
        layout: One of `LAYOUTS`.
        outermost: Which dim of the mesh is the outermost one: ``dp`` or ``tp``.
        hidden: Width inside of a block.
        norms: See `tensor_parallel`.
    """
    model, others = net(hidden), dist.get_world_size() // 2
    if layout == "cp":
        mesh = init_device_mesh("cpu", (others, 2), mesh_dim_names=("dp", "cp"))
        dims = mesh["dp", "cp"]._flatten("dp_cp")
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (others, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        dims = mesh["replicate", "shard"]
    else:
        shape, names = ((others, 2), ("dp", "tp")) if outermost == "dp" else ((2, others), ("tp", "dp"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        dims = mesh["dp"]
    if layout != "cp":
        tensor_parallel(model, mesh["tp"], norms=norms)
    outer: nn.Module = model
    if layout == "ddp":
        outer = DistributedDataParallel(model, device_mesh=dims)
    else:
        for part in (*model, model):
            fully_shard(part, mesh=dims)
    return Run(outer, torch.optim.AdamW(outer.parameters(), lr=1e-2), dims)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def unsent(session: Session) -> dict[str, Tensor]:
    """What this rank has not sent of its parts of the matrices."""
    found = {}
    for name in session.sync.specs:
        values = session.sync.state.store(name).export_unsent(name)
        if (value := sum_of_known(values, session.sync.state.carryover.get(name))) is not None:
            found[name] = value.clone()
    return found
