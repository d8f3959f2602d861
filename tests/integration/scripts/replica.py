"""A script as in Accelerate's documentation: nothing in it knows of compression, or of other replicas."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    x = torch.randn(96, 16)
    data = TensorDataset(x, x[:, :8].tanh(), torch.arange(96))
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    accelerator = Accelerator()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    seen: list[int] = []
    for batch, target, index in loader:
        accelerator.backward(F.mse_loss(model(batch), target))
        optimizer.step()
        optimizer.zero_grad()
        seen += index.tolist()
        if accelerator.num_processes * len(seen) == 48:
            break
    state = accelerator.get_state_dict(model)
    total = sum(value.double().sum().item() for value in state.values()) if state else None  # under FSDP2 on one rank
    out = out.with_stem(out.stem + str(accelerator.process_index))
    accelerator.end_training()
    out.write_text(json.dumps({"seen": seen, "total": total, "type": type(model).__name__}))


if __name__ == "__main__":
    main()
