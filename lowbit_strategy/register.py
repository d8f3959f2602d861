"""Registering the strategy names with Lightning and Fabric, in both of their namespaces.

Names are read when a Trainer is built, so import order does not matter: a namespace that is imported already is served
at once, another one as soon as it is imported.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import wrapt

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.presets import register_presets
from lowbit_strategy.methods.auto import Auto
from lowbit_strategy.methods.outer.registry import OUTER_RULES, default_compressor
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.options.suggestions import nearest

# framework module -> (our module with its strategies, where its registry is)
_NAMESPACES = {
    "lightning.pytorch": ("lowbit_strategy.lightning", "lightning.pytorch.strategies:StrategyRegistry"),
    "pytorch_lightning": ("lowbit_strategy.pytorch_lightning", "pytorch_lightning.strategies:StrategyRegistry"),
    "lightning.fabric": ("lowbit_strategy.fabric", "lightning.fabric.strategies:STRATEGY_REGISTRY"),
    "lightning_fabric": ("lowbit_strategy.lightning_fabric", "lightning_fabric.strategies:STRATEGY_REGISTRY"),
}

# As Lightning registers its own "ddp".
_START_METHODS = {"": None, "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {"": None, "_find_unused_parameters_true": True, "_find_unused_parameters_false": False}


def register_when_imported() -> None:
    """Once per process; called by ``import lowbit_strategy``."""
    for namespace in _NAMESPACES:
        wrapt.register_post_import_hook(_register, namespace)


def register_compressor(name: str, compressor: Compressor) -> None:
    """Make a compressor known by name: strategies ``<name>_ddp``, ``<name>_fsdp``, ``<name>_hsdp``, and `name` wherever
    a compressor is expected. Call it where every process comes by, at the end of the module that has the compressor.

    Args:
        name: Lower-case letters, digits and underscores.
        compressor: A configuration.

    Raises:
        ValueError: The name is taken, or not of this form.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name must be lower-case letters, digits and underscores, got {name!r}")
    if PRESETS.get(name) == compressor:
        return  # the module has been imported under two names
    if name in {*PRESETS, *OUTER_RULES}:
        raise ValueError(f"there is a compressor or outer rule called {name!r} already: choose another name")
    PRESETS[name] = compressor
    register_presets({name: compressor})
    for namespace in _NAMESPACES:
        if namespace in sys.modules:
            _register(sys.modules[namespace])


def strategy_names() -> Iterator[tuple[str, Compressor, str, dict[str, Any]]]:
    """Each registered name with its compressor, its kind (``DDP`` or ``FSDP``) and the strategy's other arguments."""
    for name, compressor in (PRESETS | {"lowbit": Auto()}).items():
        yield f"{name}_fsdp", compressor, "FSDP", {}
        yield f"{name}_hsdp", compressor, "FSDP", {"shard_size": "node"}
        for ending, given in _ddp_endings():
            yield f"{name}_ddp{ending}", compressor, "DDP", given
    for name, rule in OUTER_RULES.items():
        yield f"{name}_hsdp", default_compressor(rule), "FSDP", {"shard_size": "node", "outer": rule}
        for ending, given in _ddp_endings():
            yield f"{name}_ddp{ending}", default_compressor(rule), "DDP", {**given, "outer": rule}


def _ddp_endings() -> Iterator[tuple[str, dict[str, Any]]]:
    for suffix, start_method in _START_METHODS.items():
        for ending, unused in _UNUSED.items():
            options = {"start_method": start_method, "find_unused_parameters": unused}
            yield f"{suffix}{ending}", {key: value for key, value in options.items() if value is not None}


def _register(module: Any) -> None:
    ours, registry_path = _NAMESPACES[module.__name__]
    registry_module, registry_name = registry_path.split(":")
    registry = getattr(import_module(registry_module), registry_name)
    for name, compressor, kind, options in strategy_names():
        if name not in registry:
            build = partial(_build, ours, f"LowBit{kind}Strategy")
            description = f"{kind} with {name.partition('_')[0]}"
            registry.register(name, build, description=description, compressor=compressor, **options)
    if not isinstance(registry.available_strategies(), _Names):
        wrapt.wrap_function_wrapper(registry, "available_strategies", lambda all_of, _, a, k: _Names(all_of(*a, **k)))


def _build(ours: str, strategy: str, **arguments: Any) -> Any:
    """Ours is imported when a Trainer asks for it: it may be what is importing the framework right now."""
    return getattr(import_module(ours), strategy)(**arguments)


class _Names(list[str]):
    """The names of a registry. Frameworks look a strategy up in it, and their error for an unknown one has no hint: a
    warning before it gives one.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if isinstance(name, str) and (advice := _advice(name.lower(), self)):
            warnings.warn(f"there is no strategy {name!r}{advice}", stacklevel=2)
        return False


def _advice(name: str, known: list[str]) -> str:
    """What to write instead of a name that looks like one of ours; empty if it does not."""
    if name in PRESETS:
        return f", {name} is a compressor: use {name}_ddp, {name}_fsdp or {name}_hsdp"
    if name in OUTER_RULES:
        return f", {name} is an outer rule: use {name}_ddp or {name}_hsdp"
    plain = [each for each in known if "_ddp_" not in each]
    near = nearest(name, plain, likeness=0.75)
    ours = {*PRESETS, *OUTER_RULES}
    return f"; did you mean {near!r}?" if near and near.rpartition("_")[0] in ours else ""
