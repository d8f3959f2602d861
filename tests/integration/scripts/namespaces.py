"""Every name in every namespace: ``namespaces.py first|last|never`` says when the package is imported."""

from __future__ import annotations

import sys
from importlib import import_module

ORDER = sys.argv[1]
if ORDER == "first":
    import lowbit_strategy

import lightning as L  # noqa: E402, F401  # each brings its Fabric along
import pytorch_lightning as pl  # noqa: E402, F401

if ORDER == "last":
    import lowbit_strategy  # noqa: F401

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

REGISTRIES = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def registered() -> None:
    """Last, because it imports the package."""
    from lowbit_strategy import PRESETS

    for module, name in REGISTRIES.items():
        names = set(getattr(import_module(module), name).available_strategies())
        print("registered", module, len({f"{preset}_{kind}" for preset in PRESETS for kind in ("ddp", "fsdp")} - names))


def trained(framework: str, kind: str) -> None:
    """One rank is enough to see the right classes at work; nothing is sent."""
    base = import_module(framework)

    class Model(base.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(16, 64)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.ones(8, 16), torch.ones(8, 64)), batch_size=2)
    trainer = base.Trainer(strategy=f"loco_{kind}", accelerator="cpu", devices=1, max_steps=2, **QUIET)
    trainer.fit(Model(), data)
    strategy = type(trainer.strategy)
    assert issubclass(strategy, import_module(f"{framework}.strategies").Strategy)
    print(framework, kind, f"{strategy.__module__}.{strategy.__name__}", trainer.strategy.sync.step_index)


def with_fabric(framework: str, kind: str) -> None:
    fabric = import_module(framework).Fabric(strategy=f"loco_{kind}", accelerator="cpu", devices=1)
    fabric.launch()
    net = nn.Linear(16, 64)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    strategy = type(fabric.strategy)
    print(framework, kind, f"{strategy.__module__}.{strategy.__name__}", fabric.strategy.sessions[0].sync.step_index)


if __name__ == "__main__":
    for kind in ("ddp", "fsdp"):
        trained("lightning.pytorch", kind)
        trained("pytorch_lightning", kind)
        with_fabric("lightning.fabric", kind)
        with_fabric("lightning_fabric", kind)
    registered()
