"""Decides in which steps the squares of a parameter's gradients are sent."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence

EVERY = 32  # steps between two exchanges of a parameter's squares, after the first ones
WINDOW = 8  # steps whose squares are added up for an exchange
_GROWTH = 4  # steps without an exchange: a quarter of those so far, at most `EVERY`


def turns(names: Sequence[str]) -> dict[str, int]:
    """The number of steps by which each parameter is exchanged before the first ones, so that only a part of the model
    adds up squares at a time. Turns follow the model's order, not modules or buckets, so that neighbors are sent
    together.
    """
    return {name: WINDOW * (EVERY // WINDOW * at // len(names)) for at, name in enumerate(names)}


@functools.cache
def _first_exchanges() -> tuple[tuple[int, ...], int]:
    """The steps of the warm-up in which every parameter is exchanged, and the step after it."""
    steps, step = [], 0
    while step // _GROWTH < EVERY:
        steps.append(step)
        step += max(1, step // _GROWTH)
    return tuple(steps), step


def steps_until_due(age: int, turn: int) -> int:
    """Steps until a parameter's squares are exchanged when it is reduced for the `age`-th time; see `turns`."""
    steps, end = _first_exchanges()
    if age <= steps[-1]:
        return steps[bisect_left(steps, age)] - age
    first = max(age, end)
    return first - age + -(first + turn) % EVERY
