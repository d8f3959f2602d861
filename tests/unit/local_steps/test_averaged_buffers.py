"""What differs between ranks in addition to trained parameters."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from lowbit_strategy.local_steps.averaged_buffers import AveragedBuffers
from testing.worlds.threaded import ThreadedWorld

CPU = torch.device("cpu")


def compared(values: Sequence[float], known: Sequence[int]) -> tuple[list[list[float]], list[bool]]:
    """Each rank's frozen parameter and counter after a comparison, and whether the parameter is averaged later."""
    world = ThreadedWorld(len(values))
    beside: list[dict[str, Tensor]] = [
        {"fixed": nn.Parameter(torch.tensor([value]), requires_grad=False), "count": torch.tensor([rank])}
        for rank, value in enumerate(values)
    ]
    buffers = [AveragedBuffers(lambda own=own: own) for own in beside]  # type: ignore[misc]

    def compare(rank: int) -> None:
        found = buffers[rank].differing(world.comms[rank], CPU, known, floats_only=True)
        buffers[rank].take_differing(found)

    with ThreadPoolExecutor(len(values)) as ranks:
        list(ranks.map(compare, range(len(values))))
    world.close()
    return [[*own["fixed"].tolist(), *own["count"].tolist()] for own in beside], ["fixed" in b.shared for b in buffers]


@pytest.mark.parametrize(
    ("values", "known", "expected", "averaged"),
    [
        ([2.0, 2.0, 5.0], (0, 1), 2.0, False),  # the last one is new
        ([5.0, 2.0, 5.0], (1,), 2.0, False),
        ([2.0, 4.0, 9.0], (0, 1), 3.0, True),  # those who trained differ
        ([1.0, 2.0, 6.0], (0, 1, 2), 3.0, True),
        ([2.0, 2.0, 2.0], (0, 1, 2), 2.0, False),
    ],
)
def test_those_who_are_new_get_what_the_others_agree_on(
    values: list[float], known: tuple[int, ...], expected: float, averaged: bool
) -> None:
    now, is_averaged = compared(values, known)
    assert now == [[expected, rank] for rank in range(3)]
    assert is_averaged == [averaged] * 3
