"""Registering the strategy names with Lightning and Fabric, in both of their namespaces.

Names are read when a Trainer is built, so import order does not matter: a namespace that is imported already is served
at once, another one as soon as it is imported.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import wrapt

from lowbit_strategy.methods.registry import PRESETS

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
    for name, compressor in PRESETS.items():
        for kind in ("DDP", "FSDP"):
            key = f"{name}_{kind.lower()}"
            if key not in registry:
                build = partial(_build, ours, f"LowBit{kind}Strategy")
                registry.register(key, build, description=f"{kind} with {name} gradients", compressor=compressor)


def _build(ours: str, strategy: str, **arguments: Any) -> Any:
    """Ours is imported when a Trainer asks for it: it may be what is importing the framework right now."""
    return getattr(import_module(ours), strategy)(**arguments)
