"""Compares ranks before the first step, so that a difference is an error and not a hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import canonical_name, named_parameters
from lowbit_strategy.version import __version__

Facts = Mapping[str, object]


def fingerprint(
    compressor: Compressor, module: nn.Module, *, scatter: bool, settings: Mapping[str, object]
) -> dict[str, object]:
    """Everything that must be the same on all ranks, by names that a user knows."""
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
    """A configuration as plain values by dotted names. Functions become names, since ranks' addresses differ."""
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


def handshake(mine: Facts, group: dist.ProcessGroup | None = None) -> None:
    """Compare `mine` across the ranks of `group`.

    Raises:
        LostRankError: A rank has ended.
        RuntimeError: Raised on every rank, naming the first rank and field that differ from rank 0.
    """
    everyone = gathered(dict(mine), group, "the comparison of models and options")
    for rank, theirs in enumerate(everyone):
        for field in everyone[0] | theirs:
            value, their_value = everyone[0].get(field), theirs.get(field)
            if their_value != value:
                difference = _difference(value, their_value)
                raise RuntimeError(
                    f"rank {rank} differs from rank 0 in {field}: {difference}."
                    " All ranks must run the same model, configuration and versions"
                )


def _difference(expected: object, found: object) -> str:
    """The first place where two facts differ, short enough to read."""
    if isinstance(expected, list) and isinstance(found, list):
        for index, (a, b) in enumerate(zip(expected, found, strict=False)):
            if a != b:
                return f"number {index} is {b} instead of {a}"
        return f"{len(found)} instead of {len(expected)}"
    return f"{found} instead of {expected}"
