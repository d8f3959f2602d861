"""Gradients are reduced in the types that methods choose, also where backward runs inside an autocast region."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from lowbit_strategy.engine.bucket import Stages


def without_autocast(stages: Stages, device_type: str) -> Stages:
    """`stages`, each of them run with autocast off; between them it is as the caller has it.

    A backward pass inside an autocast region would make a method's matrix products bfloat16.
    """
    while True:
        off = torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
        try:
            with off:
                pending = next(stages)
        except StopIteration:
            return
        yield pending
