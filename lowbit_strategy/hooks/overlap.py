"""Reduces FSDP2's gradients while backward continues: on CPU in a thread, on CUDA in a stream given to FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.runners import BucketWorker
from lowbit_strategy.hooks.waiting import waiting


class OverlappedRunner:
    """Reduces the modules' shards while backward continues, in the same order on all ranks.

    Attributes:
        worker: Runs the stages; None on CUDA. It holds no reference to the engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        on_cpu = sync.device.type == "cpu"
        self.worker = BucketWorker() if on_cpu else None
        self.stream = None if on_cpu else torch.cuda.Stream(sync.device, priority=-1)
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._on_done: list[Callable[[], None]] = []

    def run(self, stages: Stages, result: Tensor, *, blocking: bool, on_done: Callable[[], None]) -> None:
        """Reduce into `result`, then call `on_done`. If `blocking`, return when this is done."""
        if self.worker is None:
            wait_for_all(stages)
            on_done()
            return
        self._futures.append(self.worker.submit(stages, result=result, last=False))
        self._on_done.append(on_done)
        if blocking:
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is in flight. Call it on all ranks at the same point."""
        if not self._futures:
            return
        assert self.worker is not None
        self.worker.finish()
        futures, self._futures = self._futures, []
        following, self._on_done = self._on_done, []
        with waiting(self._sync):
            for future in futures:
                future.wait()
        for on_done in following:
            on_done()
