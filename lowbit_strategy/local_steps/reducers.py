"""Sends a fragment's buckets, in the background or blocking."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.engine.bucket_schedule import BucketSchedule, Stages


class AsyncReducer(Protocol):
    """Reduces while its caller continues."""

    def submit(self, *buckets: Stages, result: Tensor, last: bool) -> Pending: ...


class BlockingReducer(AsyncReducer):
    """A reducer whose `submit` of the last bucket returns when all results have arrived."""

    def __init__(self) -> None:
        self._schedule = BucketSchedule()

    def submit(self, *buckets: Stages, result: Tensor, last: bool) -> Pending:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[result.device] if result.is_cuda else None)
        self._schedule.start(buckets, result, future, last=last)
        return future
