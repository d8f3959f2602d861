"""Registers strategy names with Lightning and Fabric, in both of their namespaces.

Names are data here. Compressors and strategies are imported only when a name is looked up.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowbit_strategy.leaves import NAMES, RULES, load
from lowbit_strategy.methods.entries import ENTRIES

if TYPE_CHECKING:
    from lowbit_strategy.methods._base.compressor import Compressor

# A framework's module: its registry, our module with its strategies.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lowbit_strategy.lightning"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "lowbit_strategy.pytorch_lightning"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lowbit_strategy.fabric"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "lowbit_strategy.lightning_fabric"),
}

COMPRESSORS = list(ENTRIES)
_PACKAGE = "lowbit"  # lets the package choose

# As Lightning registers its own "ddp".
_START_METHODS = {"": None, "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {"": None, "_find_unused_parameters_true": True, "_find_unused_parameters_false": False}


def register_compressor(name: str, compressor: Compressor) -> None:
    """Register a compressor. This defines the strategies ``<name>_ddp``, ``<name>_fsdp`` and ``<name>_hsdp``, and makes
    `name` valid wherever a compressor is expected. Call it at the end of the compressor's module, so that every process
    does. For files that ``accelerate launch`` reads, see `register_controller`.

    Args:
        name: Lower-case letters, digits and underscores.
        compressor: A configuration.

    Raises:
        ValueError: The name is taken or has an invalid form.
    """
    from lowbit_strategy.methods.registry import PRESETS

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name must be lower-case letters, digits and underscores, got {name!r}")
    if PRESETS.get(name) == compressor:
        return  # the module was imported under two names
    if name in {*COMPRESSORS, *RULES}:
        raise ValueError(f"there is a compressor or outer rule called {name!r} already: choose another name")
    PRESETS[name] = compressor
    COMPRESSORS.append(name)
    for module in _REGISTRIES:
        if module in sys.modules:
            register_names(sys.modules[module])


def strategy_names() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """All strategies: name, compressor or rule, ``DDP`` or ``FSDP``, and other arguments."""
    for name in (*COMPRESSORS, _PACKAGE, *RULES):
        if name not in RULES:
            yield f"{name}_fsdp", name, "FSDP", {}
        yield f"{name}_hsdp", name, "FSDP", {"shard_size": "node"}
        for suffix, start_method in _START_METHODS.items():
            for ending, unused in _UNUSED.items():
                options = {"start_method": start_method, "find_unused_parameters": unused}
                given = {key: value for key, value in options.items() if value is not None}
                yield f"{name}_ddp{suffix}{ending}", name, "DDP", given


def register_names(module: ModuleType) -> None:
    """Add all names to the registry of `module`, a framework's ``strategies``."""
    registry_name, ours = _REGISTRIES[module.__name__]
    registry = getattr(module, registry_name)
    for name, base, kind, options in strategy_names():
        if name not in registry:
            build = partial(_build, ours, f"LowBit{kind}Strategy", base)
            registry.register(name, build, description=f"{kind} with {base}", **options)
    if not isinstance(registry.available_strategies(), _Names):
        available = registry.available_strategies
        registry.available_strategies = lambda: _Names(available())


def _build(ours: str, strategy: str, base: str, **options: Any) -> Any:
    """Make a strategy; called by the registry."""
    return getattr(import_module(ours), strategy)(**strategy_arguments(base), **options)


def strategy_arguments(base: str) -> dict[str, Any]:
    """A strategy's arguments for the name of a compressor or an outer rule."""
    from lowbit_strategy.methods.registry import CHOOSER, preset

    if base in RULES:
        return {"outer": load(NAMES["OUTER_RULES"], base)[base]}
    return {"compressor": preset(CHOOSER if base == _PACKAGE else base)}


class _Names(list[str]):
    """The names of a registry. Looking up an unknown one gives a hint, which the frameworks' own errors lack."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if isinstance(name, str) and (advice := _advice(name.lower(), self)):
            warnings.warn(f"there is no strategy {name!r}{advice}", stacklevel=2)
        return False


def _advice(name: str, known: list[str]) -> str:
    """A hint for an unknown name that looks like one of ours; "" if it does not."""
    from lowbit_strategy.options.conversion import nearest

    if name in COMPRESSORS:
        return f", {name} is a compressor: use {name}_ddp, {name}_fsdp or {name}_hsdp"
    if name in RULES:
        return f", {name} is an outer rule: use {name}_ddp or {name}_hsdp"
    near = nearest(name, [each for each in known if "_ddp_" not in each], likeness=0.75)
    return f"; did you mean {near!r}?" if near and near.rpartition("_")[0] in {*COMPRESSORS, *RULES} else ""
