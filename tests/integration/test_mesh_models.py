"""Models as they are written for meshes: tied weights, sequence parallelism, parts that are frozen, two models over two
dims, meshes of a part of the world. Dense equals stock.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Dense
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.plan.mesh_dims import dims_of
from testing.processes.scenarios import Facts, scenarios
from testing.training.meshes import LOCO, WIDTH, Block, local

VOCABULARY = 64


class LanguageModel(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        for part in (*self.blocks, self):
            fully_shard(part, mesh=mesh, **options)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tensor_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tied() -> tuple[nn.Module, int]:
    """Rows of the embedding are the columns of the head."""
    mesh, model = tensor_mesh(), LanguageModel(tied=True)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    model.head.weight = model.embed.weight
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.shard(mesh["dp"])
    return model, mesh["dp"].get_local_rank()


def sequence_parallel() -> tuple[nn.Module, int]:
    """Norms are replicated, and their gradients are sums over the parts of a sequence."""
    mesh, model = tensor_mesh(), LanguageModel()
    whole, parts = Replicate(), Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=whole),
    }
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        up, down = ColwiseParallel(input_layouts=parts), RowwiseParallel(output_layouts=parts)
        parallelize_module(block, mesh["tp"], {"norm": SequenceParallel(), "up": up, "down": down})
    model.shard(mesh["dp"])
    return model, mesh["dp"].get_local_rank()


def frozen() -> tuple[nn.Module, int]:
    """One half; the first block is unfrozen in training."""
    mesh, model = tensor_mesh(), LanguageModel()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.shard(mesh["dp"])
    return model, mesh["dp"].get_local_rank()


def flattened() -> tuple[nn.Module, int]:
    """Replicas of ranks that shard and have parts of sequences."""
    mesh, model = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "cp")), LanguageModel()
    mesh["shard", "cp"]._flatten("shard_cp")
    model.shard(mesh["replicate", "shard_cp"])
    return model, dist.get_rank()


def unnamed() -> tuple[nn.Module, int]:
    """A mesh of one dim without a name, on whose halves forward passes leave weights."""
    model = LanguageModel()
    model.shard(init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    return model, dist.get_rank()


MODELS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    each.__name__: each for each in (tied, sequence_parallel, frozen, flattened, unnamed)
}


def train(model: nn.Module, place: int, compressor: Any, *, clips: bool = False) -> tuple[list[float], list[Tensor]]:
    """Six steps: losses, and this rank's weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    exact = {"weights": "exact"} if compressor == Dense() and not isinstance(model, DistributedDataParallel) else {}
    session = None if compressor is None else compress(model, optimizer, compressor, **exact)
    losses = []
    for step in range(6):
        loss = loss_of(model, 100 * step + place)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            for param in model.parameters():
                param.requires_grad_(True)
    if session is not None:
        session.close()
    return losses, [local(param).detach().clone() for param in model.parameters()]


def trained(folder: Path, model: str) -> Facts:
    ways = {"stock": None, "dense": Dense(), "loco": LOCO}
    return {way: train(*MODELS[model](), each, clips=model == "sequence_parallel") for way, each in ways.items()}


@pytest.mark.slow
@scenarios(trained, world_size=4, model=tuple(MODELS))
def test_as_stock(facts: list[Facts]) -> None:
    for rank in facts:
        (stock, weights), (dense, same) = rank["stock"], rank["dense"]
        assert dense == pytest.approx(stock, rel=2e-6)  # of four ranks gloo adds in another order
        assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(weights, same, strict=True) if a.numel())
        assert rank["loco"][0] == pytest.approx(stock, rel=0.02)


def described(folder: Path) -> Facts:
    """A mesh that is cut from one of all ranks, as torchtitan's are; DTensors know its dims."""
    mesh, model = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))._unflatten(0, (2, 2), ("dp", "tp")), Block()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    session = compress(model, torch.optim.AdamW(model.parameters()), LOCO)
    dims = dims_of(session.sync, 0)
    session.close()
    return {"dims": dims}


@pytest.mark.slow
@scenarios(described, world_size=4)
def test_dims_are_those_of_parameters(facts: list[Facts]) -> None:
    assert [rank["dims"] for rank in facts] == ["dp 2 x tp 2, compressed over dp"] * 4


def elsewhere(folder: Path) -> Facts:
    """Two models over two dims; three ranks of four; a group of two by DDP, while the others do nothing."""
    found: dict[str, Any] = {}
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), dist.get_rank()
    three, pair = DeviceMesh("cpu", [0, 1, 2]), dist.new_group([1, 3])
    for way, compressor in {"stock": None, "dense": Dense()}.items():
        for dim in ("a", "b"):
            model = LanguageModel()
            model.shard(mesh[dim])
            found[f"{way} {dim}"] = train(model, mesh[dim].get_local_rank(), compressor)
        if rank < 3:
            model = LanguageModel()
            model.shard(three)
            found[f"{way} three"] = train(model, rank, compressor)
        if rank in (1, 3):
            found[f"{way} pair"] = train(DistributedDataParallel(LanguageModel(), process_group=pair), rank, compressor)
    dist.barrier()
    return found


@pytest.mark.slow
@scenarios(elsewhere, world_size=4)
def test_on_other_ranks(facts: list[Facts]) -> None:
    for rank in facts:
        for name in [each for each in rank if each.startswith("dense")]:
            assert rank[name][0] == pytest.approx(rank[name.replace("dense", "stock")][0], rel=2e-6)
