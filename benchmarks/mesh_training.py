"""A small GPT on four ranks, LoCo over the data-parallel dims of a mesh, and stock.

Blocks' two-layer networks are parallel over two ranks (tensor parallelism), with FSDP2, HSDP or DDP over the other
two; or each sequence is split over two ranks (context parallelism), whose weights FSDP2 shards over all four; or two
ranks have two of four experts each (expert parallelism), sharded over the other two, and the rest is sharded over all.

    python -m benchmarks.mesh_training --json benchmarks/results/mesh_training.json
    python -m benchmarks.mesh_training --layout hsdp --json benchmarks/results/mesh_training_hsdp.json
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.plan.running import plans_of
from recipes.gpt import GPT, Block
from recipes.text import standard_library
from testing.processes.ranks import run_ranks
from testing.training.experts import MixtureOfExperts, distribute

CONTEXT, BATCH, LEARNING_RATE, LAST = 64, 8, 2e-3, 20


class Layout(str, Enum):
    fsdp, hsdp, ddp, cp, ep = "fsdp", "hsdp", "ddp", "cp", "ep"


class ContextBlock(Block):
    """Attention over a sequence of which each rank of `mesh` has an equal part."""

    mesh: DeviceMesh

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        qkv = self.qkv(self.attention_norm(x_BTC)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        k, v = (all_gather_single_autograd(each.contiguous(), 2, self.mesh.get_group()) for each in (k, v))
        rows = torch.arange(T)[:, None] + T * self.mesh.get_local_rank()
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=rows >= torch.arange(k.shape[2]))
        x_BTC = x_BTC + self.attention_out(attended.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTC))))


class ExpertBlock(Block):
    """A mixture of experts in place of the two-layer network."""

    mixture: MixtureOfExperts

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        qkv = self.qkv(self.attention_norm(x_BTC)).view(B, T, 3, self.heads, C // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        out: Tensor = self.mixture(x_BTC + self.attention_out(attended.transpose(1, 2).reshape(B, T, C)))
        return out


class ContextGPT(GPT):
    """The same model, given this rank's part of each sequence."""

    mesh: DeviceMesh

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        start = length * self.mesh.get_local_rank()
        x_BTC = self.embedding(tokens_BT) + self.position.weight[start : start + length]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


def batch(tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(tokens.numel() - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    windows = tokens[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def identical(values: Tensor, group: Any) -> bool:
    """On all ranks of the group, to the bit."""
    others = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, values.contiguous(), group=group)
    return all(torch.equal(values, other) for other in others)


def with_experts(model: GPT) -> tuple[nn.Module, DeviceMesh, DeviceMesh]:
    """The model; the mesh of all ranks, and that over which experts are sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone, beside = mesh["efsdp", "ep"]._flatten("dp"), mesh["efsdp"]
    for block in model.blocks:
        del block.mlp_norm, block.mlp_in, block.mlp_out
        block.__class__, block.mixture = ExpertBlock, MixtureOfExperts(64)
        distribute(block.mixture, mesh["ep"])
        fully_shard(block.mixture.experts, mesh=beside)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=everyone)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo's only way to divide by another number
            part.set_gradient_divide_factor(4.0)
    return model, everyone, beside


def wrapped(layout: Layout, seed: int) -> tuple[nn.Module, DeviceMesh, DeviceMesh, DeviceMesh | None]:
    """The model; dims whose ranks have other sequences, those that share weights, and that of parts of sequences."""
    torch.manual_seed(seed)
    model = GPT(width=64, depth=2, heads=4, context=CONTEXT)
    if layout is Layout.cp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model.__class__, model.mesh = ContextGPT, mesh["cp"]
        for block in model.blocks:
            block.__class__, block.mesh = ContextBlock, mesh["cp"]
        dims = mesh["dp", "cp"]._flatten("dp_cp")
    else:
        shape, names = ((2, 1, 2), ("dp", "shard", "tp")) if layout is Layout.hsdp else ((2, 2), ("dp", "tp"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()})
        dims = mesh["dp", "shard"] if layout is Layout.hsdp else mesh["dp"]
    if layout is Layout.ddp:
        return DistributedDataParallel(model, device_mesh=dims), mesh["dp"], dims, None
    for part in (*model.blocks, model):
        fully_shard(part, mesh=dims)
    same = mesh["dp"] if layout is Layout.hsdp else dims
    return model, mesh["dp"], same, mesh["cp"] if layout is Layout.cp else None


def train(
    layout: Layout, compressed: bool, steps: int, seed: int, weights: str | None = None, balance: float = 0.0
) -> dict[str, Any]:
    if layout is Layout.ep:
        torch.manual_seed(seed)
        model, different, beside = with_experts(GPT(width=64, depth=2, heads=4, context=CONTEXT))
        same, context = different, None
    else:
        model, different, same, context = wrapped(layout, seed)
        beside = same
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    session = compress(model, optimizer, LoCo(), weights=weights) if compressed else None
    before = 0 if session is None else session.sync.sent_nbytes

    def own(seed: int, text: Tensor) -> tuple[Tensor, Tensor]:
        whole = batch(text, seed)
        if context is None:
            return whole
        inputs, targets = (each.chunk(2, dim=1)[context.get_local_rank()] for each in whole)
        return inputs, targets

    losses = []
    for step in range(steps):
        tokens, targets = own(different.size() * step + different.get_local_rank(), standard_library("train"))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        uneven = [part.imbalance for part in model.modules() if isinstance(part, MixtureOfExperts)]
        (loss + balance * sum(uneven) if balance else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses}
    if session is not None:
        found["sent_nbytes"] = (session.sync.sent_nbytes - before) / steps
        transfers = [each for plan in plans_of(session.sync) for each in plan.gradients]
        found["planned_nbytes"] = sum(message.total_nbytes for each in transfers for message in each.messages)
    model.eval()
    with torch.no_grad():
        held_out = [own(seed, standard_library("validation")) for seed in range(8)]
        found["validation"] = sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in held_out) / 8
    if session is not None:
        session.close()
    for part in model.modules():
        if hasattr(part, "unshard"):
            part.unshard()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = [("", param) for param in params] if layout is Layout.ddp else list(model.named_parameters())
    whole = [(name, (p.to_local() if isinstance(p, DTensor) else p).detach()) for name, p in held]
    found["identical"] = all(
        identical(values, (beside if "experts" in name else same).get_group()) for name, values in whole
    )
    return found


def both(
    rank: int, world_size: int, layout: Layout, steps: int, seed: int, weights: str | None, balance: float
) -> dict[str, Any]:
    torch.set_num_threads(1)
    stock = train(layout, False, steps, seed, balance=balance)
    return {"stock": stock, "loco": train(layout, True, steps, seed, weights, balance)}


def main(
    layout: Annotated[Layout, typer.Option(help="what carries gradients, or cp: context parallelism")] = Layout.fsdp,
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 200,
    seed: Annotated[int, typer.Option(help="seed of the first weights; data stay the same")] = 0,
    weights: Annotated[str | None, typer.Option(help="how FSDP2's travel, such as exact; default: LoCo's")] = None,
    balance: Annotated[float, typer.Option(help="weight of the experts' load-balancing loss")] = 0.0,
    json_path: Annotated[Path, typer.Option("--json", help="results file")] = Path(
        "benchmarks/results/mesh_training.json"
    ),
) -> None:
    """Train with LoCo and without."""
    ranks = run_ranks(both, 4, layout, steps, seed, weights, balance, timeout=1500)
    result: dict[str, Any] = {"steps": steps, "layout": layout.value, "seed": seed, "weights": weights}
    result["balance"] = balance
    for way in ("stock", "loco"):
        each = [rank[way] for rank in ranks]  # of tensor-parallel ranks two have the same losses
        result[way] = {
            "last_losses": sum(sum(rank["losses"][-LAST:]) / LAST for rank in each) / 4,
            "validation": sum(rank["validation"] for rank in each) / 4,
            "identical": all(rank["identical"] for rank in each),
        }
    for key in ("last_losses", "validation"):
        result[f"{key}_ratio"] = result["loco"][key] / result["stock"][key]
    result |= {key: ranks[0]["loco"][key] for key in ("sent_nbytes", "planned_nbytes")}
    json_path.write_text(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
