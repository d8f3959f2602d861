"""Keeps residuals from growing too large for their gradients: ``max_residual=``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.engine.bucket import Bucket, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase


class MaxResidual(Part):
    """The largest norm of a residual, in units of its gradient's norm; None: there is no bound."""

    def __init__(self, options: SyncOptions) -> None:
        self._limit = options.max_residual

    def check_options(self, options: Any) -> None:
        if self._limit is not None and not self._limit > 0:
            raise ValueError(f"max_residual must be a positive number or None, got {self._limit!r}")

    def attach(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> None:
        if self._limit is not None:
            BoundedResiduals(sync, self._limit)


class BoundedResiduals(StepListener, BucketObserver):
    """Shrinks residuals before a bucket is reduced. If a gradient is zero, its residual waits.

    Args:
        limit: Largest norm of a residual, in units of its gradient's norm.
    """

    def __init__(self, sync: GradientSync, limit: float) -> None:
        self._state, self._limit = sync.state, limit
        sync.listeners.add(self, StepPhase.RECORD)  # before probes and monitors observe

    def begin_step(self) -> BoundedResiduals:
        return self

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        for param in bucket.params:
            store = self._state.store(param.name)
            residual = store.residual(param.name)
            if residual is not None:
                allowed, norm = self._limit * param.within(x, out).x.norm(), residual.norm()
                factor = torch.where((allowed > 0) & (allowed < norm), allowed / norm, 1.0)
                store.method.rescale_residual_(store.tensors(param.name), factor)
        yield from stages
