"""Before the first step all ranks compare what they are about to do."""

from __future__ import annotations

import re

import torch.distributed as dist

from lowbit_strategy.model.handshake import handshake
from testing.processes.ranks import run_ranks

DIFFERENCES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "same": ({"x": 1}, {"x": 1}, ""),
    "value": ({"x": 1, "y": 2}, {"x": 1, "y": 3}, "rank 1 differs from rank 0 in y: 3 instead of 2"),
    "missing": ({"x": 1, "y": 2}, {"x": 1}, "rank 1 differs from rank 0 in y: None instead of 2"),
    "added": ({"x": 1}, {"x": 1, "z": 4}, "rank 1 differs from rank 0 in z: 4 instead of None"),
    "entry": ({"p": [("a", 1), ("b", 2)]}, {"p": [("a", 1), ("c", 2)]}, r"in p: number 1 is \('c', 2\) instead of"),
    "length": ({"p": [("a", 1), ("b", 2)]}, {"p": [("a", 1)]}, "in p: 1 instead of 2"),
}


def _meet(rank: int, world_size: int) -> list[str]:
    """What each comparison raises, if the last rank holds the second of the two; in a group of their own."""
    group, raised = dist.new_group(), []
    for first, second, _ in DIFFERENCES.values():
        try:
            handshake(second if rank == world_size - 1 else first, group)
            raised.append("")
        except RuntimeError as error:
            raised.append(str(error))
    return raised


def test_every_rank_names_the_first_difference() -> None:
    for world_size in (2, 3):
        for raised in run_ranks(_meet, world_size):
            for (_, _, wanted), text in zip(DIFFERENCES.values(), raised, strict=True):
                assert re.search(wanted.replace("rank 1", f"rank {world_size - 1}"), text) if wanted else text == "", (
                    text
                )
                assert not wanted or text.endswith("All ranks must run the same model, configuration and versions")
