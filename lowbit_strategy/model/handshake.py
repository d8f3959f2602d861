"""Compares ranks before the first step, so that a difference causes an error instead of a hang."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from lowbit_strategy.collectives.comm import gathered

Facts = Mapping[str, object]


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
