"""Context parallelism as in Accelerate's own examples: nothing in its training knows of compression.

What each rank saw goes to ``rank-<r>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

# Accelerate refuses its own configuration on CPU.
ParallelismConfig._validate_accelerator = lambda self, accelerator: None  # type: ignore[method-assign,assignment]


def main(folder: Path) -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(64, (32, 16))
    batches = DataLoader(TensorDataset(tokens, tokens.roll(1, 1)), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for _ in range(4):
        for tokens, targets in batches:
            x, y = tokens.clone(), targets.clone()
            with accelerator.maybe_context_parallel(buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={x, y}):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    facts = {"losses": losses, "batches": len(batches), "positions": x.shape[1]}
    (folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
