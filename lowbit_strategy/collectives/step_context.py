"""What a method may know of time and chance in one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step that a bucket is reduced in.

    Args:
        index: Optimizer steps completed.
        seed: 32 bits, private to this rank, new in every step.
        shared_seed: 32 bits, the same on all ranks, new in every step.
    """

    index: int
    seed: int
    shared_seed: int
