"""A small GPT on four ranks, tensor parallelism x FSDP2: LoCo over the data-parallel dim, and stock.

Blocks' two-layer networks are parallel over two ranks, everything is sharded over the other two.

    python -m benchmarks.mesh_training --json benchmarks/results/mesh_training.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from lowbit_strategy import LoCo
from lowbit_strategy.custom_loop import compress
from recipes.gpt import GPT
from recipes.text import standard_library
from testing.processes.ranks import run_ranks

CONTEXT, BATCH, LEARNING_RATE, LAST = 64, 8, 2e-3, 20


def batch(tokens: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(tokens.numel() - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    windows = tokens[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def identical(values: Tensor, group: Any) -> bool:
    """On all ranks of the group, to the bit."""
    others = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, values.contiguous(), group=group)
    return all(torch.equal(values, other) for other in others)


def train(compressed: bool, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(width=64, depth=2, heads=4, context=CONTEXT)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()})
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    session = compress(model, optimizer, LoCo()) if compressed else None
    before = 0 if session is None else session.sync.ranks.peers.sent_nbytes
    text, place = standard_library("train"), mesh["dp"].get_local_rank()
    losses = []
    for step in range(steps):
        tokens, targets = batch(text, 2 * step + place)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses}
    if session is not None:
        found["sent_nbytes"] = (session.sync.ranks.peers.sent_nbytes - before) / steps
        found["planned_nbytes"] = session.sync.plan().sent_nbytes
    model.eval()
    with torch.no_grad():
        held_out = [batch(standard_library("validation"), seed) for seed in range(8)]
        found["validation"] = sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in held_out) / 8
    if session is not None:
        session.close()
    for part in model.modules():
        if hasattr(part, "unshard"):
            part.unshard()
    whole = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]
    found["identical"] = all(identical(values, mesh["dp"].get_group()) for values in whole)
    return found


def both(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"stock": train(False, steps), "loco": train(True, steps)}


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 200,
    json_path: Annotated[Path, typer.Option("--json", help="results file")] = Path(
        "benchmarks/results/mesh_training.json"
    ),
) -> None:
    """Train with LoCo and without."""
    ranks = run_ranks(both, 4, steps, timeout=1500)
    result: dict[str, Any] = {"steps": steps}
    for way in ("stock", "loco"):
        first, second = (ranks[at][way] for at in (0, 2))  # the data-parallel ranks of the first column
        last = [sum(each["losses"][-LAST:]) / LAST for each in (first, second)]
        result[way] = {"last_losses": sum(last) / 2, "validation": first["validation"]}
        result[way]["identical"] = all(rank[way]["identical"] for rank in ranks)
    for key in ("last_losses", "validation"):
        result[f"{key}_ratio"] = result["loco"][key] / result["stock"][key]
    result |= {key: ranks[0]["loco"][key] for key in ("sent_nbytes", "planned_nbytes")}
    json_path.write_text(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
