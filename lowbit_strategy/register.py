"""Registering the strategy names with Lightning and Fabric, in both of their namespaces.

Names are read when a Trainer is built, so import order does not matter: a namespace that is imported already is served
at once, another one as soon as it is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import wrapt

from lowbit_strategy.reducers.registry import PRESETS

# framework module -> (our module with its strategies, where its registry is)
_NAMESPACES = {
    "lightning.pytorch": ("lowbit_strategy.lightning", "lightning.pytorch.strategies:StrategyRegistry"),
    "pytorch_lightning": ("lowbit_strategy.pytorch_lightning", "pytorch_lightning.strategies:StrategyRegistry"),
    "lightning.fabric": ("lowbit_strategy.fabric", "lightning.fabric.strategies:STRATEGY_REGISTRY"),
    "lightning_fabric": ("lowbit_strategy.lightning_fabric", "lightning_fabric.strategies:STRATEGY_REGISTRY"),
}


def register_when_imported() -> None:
    """Once per process; called by ``import lowbit_strategy``."""
    for namespace in _NAMESPACES:
        wrapt.register_post_import_hook(_register, namespace)


def _register(module: Any) -> None:
    ours, registry_path = _NAMESPACES[module.__name__]
    registry_module, registry_name = registry_path.split(":")
    registry = getattr(import_module(registry_module), registry_name)
    strategies = import_module(ours)
    for name, compressor in PRESETS.items():
        for suffix, strategy in (("ddp", strategies.LowBitDDPStrategy), ("fsdp", strategies.LowBitFSDPStrategy)):
            key = f"{name}_{suffix}"
            if key not in registry:
                registry.register(
                    key, strategy, description=f"{suffix.upper()}, {name} gradients", compressor=compressor
                )
