"""Residuals that are not allowed to grow beyond their gradients: ``max_residual=``."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.engine.bucket import Bucket, BucketObserver
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.engine.schedule import Stages


class BoundedResiduals(BucketObserver):
    """Makes residuals smaller before a bucket is reduced; where a gradient is zero, its residual waits.

    Args:
        state: What methods keep.
        limit: Largest norm of a residual, in norms of the parameter's gradient.
    """

    def __init__(self, state: MethodState, limit: float) -> None:
        self._state, self._limit = state, limit

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        for param in bucket.params:
            store = self._state.store(param.name)
            residual = store.residual(param.name)
            if residual is not None:
                allowed, norm = self._limit * param.within(x, out).x.norm(), residual.norm()
                factor = torch.where((allowed > 0) & (allowed < norm), allowed / norm, 1.0)
                store.method.rescale_({param.name: store.tensors(param.name)}, factor)
        yield from stages
