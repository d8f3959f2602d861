"""Bounded residuals: what shrinks, and what does not."""

from __future__ import annotations

import torch

from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.residual_rules.bounded import BoundedResiduals
from testing.worlds.single import engine, gradients, reduce_step

NAME = "blocks.0.weight"


def test_momentum_is_no_residual() -> None:
    plain, bounded = (engine(DGC(density=0.01, momentum=0.9)) for _ in range(2))
    BoundedResiduals(bounded, limit=0.1)
    for sync in (plain, bounded):
        for step in range(2):
            reduce_step(sync, gradients(step))
    one, other = (sync.state.tensors(NAME) for sync in (plain, bounded))
    assert other["residual"].norm() < one["residual"].norm()
    kept = one["momentum"].ne(0) & other["momentum"].ne(0)  # the rest was sent
    assert torch.equal(one["momentum"][kept], other["momentum"][kept])
