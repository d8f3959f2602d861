"""The settings and parameters that must be the same on all ranks, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import canonical_name, named_parameters
from lowbit_strategy.version import __version__


def fingerprint(
    compressor: Compressor, module: nn.Module, *, scatter: bool, settings: Mapping[str, object]
) -> dict[str, object]:
    """Everything that must be the same on all ranks, by user-facing names."""
    shapes, types, buffers = [], [], []
    for name, param in named_parameters(module):
        if param.requires_grad:
            shapes.append((name, tuple(param.shape)))
            types.append((name, str(param.dtype)))
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffers.append((canonical_name(name), tuple(buffer.shape)))
    return {
        **settings_facts(compressor, scatter=scatter, settings=settings),
        "parameters": shapes,
        "parameter types": types,
        "floating-point buffers": buffers,
    }


def settings_facts(compressor: Compressor, *, scatter: bool, settings: Mapping[str, object]) -> dict[str, object]:
    """The part of the fingerprint that is not about the model."""
    return {
        "lowbit_strategy version": __version__,
        "torch version": torch.__version__,
        "strategy": "fsdp" if scatter else "ddp",
        **to_plain("compressor", compressor),
        **settings,
    }


def to_plain(name: str, value: object) -> dict[str, object]:
    """A configuration as plain values by dotted names. Functions become names, since addresses differ between ranks."""
    found: dict[str, object] = {}
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if dataclasses.is_dataclass(value):
            found[name] = type(value).__name__
            for field in reversed(dataclasses.fields(value)):
                waiting.append((f"{name}.{field.name}", getattr(value, field.name)))
        elif isinstance(value, tuple):
            found[name] = f"{len(value)} entries"
            for index, entry in reversed(list(enumerate(value))):
                waiting.append((f"{name}[{index}]", entry))
        else:
            found[name] = getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
    return found
