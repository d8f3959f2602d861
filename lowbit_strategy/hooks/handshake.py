"""Before the first step all ranks compare what they are about to do: a difference is an error, not a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lowbit_strategy.reducers.base import Compressor
from lowbit_strategy.reducers.tensors import TensorSpec
from lowbit_strategy.version import __version__

Facts = Mapping[str, object]


def facts(compressor: Compressor, specs: Sequence[TensorSpec], *, scatter: bool, seed: int) -> dict[str, object]:
    """Everything that must be the same on all ranks, by the name a user would know it by."""
    return {
        "lowbit_strategy version": __version__,
        "torch version": torch.__version__,
        "strategy": "fsdp" if scatter else "ddp",
        "compressor": repr(compressor),
        "seed": seed,
        "parameters": [(spec.name, spec.shape) for spec in specs],
    }


def handshake(mine: Facts, group: dist.ProcessGroup | None = None) -> None:
    """Compare `mine` over the ranks of `group`.

    Raises:
        RuntimeError: On every rank, naming the first rank and field that differ from rank 0.
    """
    everyone: list[Facts] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(mine), group=group)
    for rank, theirs in enumerate(everyone):
        for field, value in everyone[0].items():
            if theirs.get(field) != value:
                difference = _difference(value, theirs.get(field))
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
