"""A small language model as in Accelerate's own examples: nothing in its training knows of compression.

What each rank saw goes to ``rank-<r>.json``. Imports little, because every launch waits for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, CONTEXT, STEPS = 64, 16, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(CONTEXT, CONTEXT), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.mix(x_BTC.transpose(1, 2)).transpose(1, 2)
        return x_BTC + self.down(torch.relu(self.up(x_BTC)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens_BT)))


def prepared(accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = torch.randint(0, VOCABULARY, (320, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    batches = DataLoader(TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), batch_size=8)
    return accelerator.prepare(model, optimizer, batches)


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> list[float]:
    losses = []
    for tokens, following in batches:
        loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def observed(accelerator: Accelerator, model: nn.Module) -> dict:
    """What PyTorch and a binding, if there is one, have recorded."""
    from torch.distributed.fsdp import FSDPModule

    if hasattr(model, "_get_ddp_logging_data"):
        records = {model._get_ddp_logging_data().get("comm_hook", "")}
    else:
        groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
        records = {type(group._reduce_scatter_comm).__name__ for group in groups if group is not None}
    seen = {"model": type(model).__name__, "records": sorted(records)}
    if (sync := getattr(getattr(accelerator, "lowbit", None), "sync", None)) is not None:
        seen |= {"steps": sync.step_index, "sent": sync.ranks.peers.sent_nbytes}
        seen["account"] = sum(sync.state.sent_nbytes(name) for name in sync.specs)
    return seen


def weights(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    accelerator = Accelerator()
    model, optimizer, batches = prepared(accelerator)
    every = list(batches)[:STEPS]
    losses = train(accelerator, model, optimizer, every[: STEPS // 2])
    accelerator.save_state(str(out / "state"))
    losses += train(accelerator, model, optimizer, every[STEPS // 2 :])
    facts = {"losses": losses, "argv": sys.argv[1:], **observed(accelerator, model)}
    whole = weights(model)
    facts["bits"] = [tensor.double().sum().item() for tensor in whole]
    loss = torch.tensor(losses[-4:]).mean()
    facts["loss"] = accelerator.gather(loss.view(1)).mean().item()

    accelerator.free_memory()
    model, optimizer, _ = prepared(accelerator)
    accelerator.load_state(str(out / "state"))
    again = train(accelerator, model, optimizer, every[STEPS // 2 :])
    same = all(torch.equal(a, b) for a, b in zip(weights(model), whole, strict=True))
    facts["resumed"] = same and again == losses[STEPS // 2 :]
    (out / f"rank-{accelerator.process_index}.json").write_text(json.dumps(facts))
    model, optimizer = accelerator.free_memory(model, optimizer)  # DDP that outlives its gloo group may abort at exit
    accelerator.end_training()
    time.sleep(0.05)  # for gloo's threads, as `collectives/comm.py` does where it is imported


if __name__ == "__main__":
    main()
