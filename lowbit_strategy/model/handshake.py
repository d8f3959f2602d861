"""Before the first step all ranks compare what they are about to do: a difference is an error, not a hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.collectives.lost_ranks import naming_lost_ranks
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import canonical_name, trainable_parameters
from lowbit_strategy.version import __version__

Facts = Mapping[str, object]


def fingerprint(
    compressor: Compressor, module: nn.Module, *, scatter: bool, settings: Mapping[str, object]
) -> dict[str, object]:
    """Everything that must be the same on all ranks, by the name a user would know it by."""
    params = trainable_parameters(module)
    return {
        "lowbit_strategy version": __version__,
        "torch version": torch.__version__,
        "strategy": "fsdp" if scatter else "ddp",
        **to_plain("compressor", compressor),
        **settings,
        "parameters": [(name, tuple(param.shape)) for name, param in params.items()],
        "parameter types": [(name, str(param.dtype)) for name, param in params.items()],
        "floating-point buffers": [
            (canonical_name(name), tuple(buffer.shape))
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point()
        ],
    }


def to_plain(name: str, value: object) -> dict[str, object]:
    """A configuration as plain values by dotted names. Functions go by name: their address differs between ranks."""
    found: dict[str, object] = {}
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop(0)
        inside: list[tuple[str, object]] = []
        if dataclasses.is_dataclass(value):
            found[name] = type(value).__name__
            inside = [(f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
        elif isinstance(value, tuple):
            found[name] = f"{len(value)} entries"
            inside = [(f"{name}[{index}]", entry) for index, entry in enumerate(value)]
        else:
            found[name] = getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
        waiting[:0] = inside
    return found


def handshake(mine: Facts, group: dist.ProcessGroup | None = None) -> None:
    """Compare `mine` over the ranks of `group`.

    Raises:
        LostRankError: A rank has ended.
        RuntimeError: On every rank, naming the first rank and field that differ from rank 0.
    """
    with naming_lost_ranks(group, "the comparison of models and options", ""):
        everyone = gathered(dict(mine), group)
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
