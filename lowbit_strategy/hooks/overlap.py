"""Reduces FSDP2's gradients while backward continues, in a thread or a stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.schedule import Stages
from lowbit_strategy.hooks.runners import BucketWorker
from lowbit_strategy.hooks.waiting import waiting


class OverlappedReducer:
    """Reduces the modules' shards while backward continues, in the same order on all ranks.

    Attributes:
        close: Stops the worker, and returns True once it has stopped. It holds no reference to the engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        on_cpu = sync.device.type == "cpu"
        self._worker = BucketWorker() if on_cpu else None
        self.close: Callable[[], bool] = (lambda: True) if self._worker is None else self._worker.close
        self.stream = None if on_cpu else torch.cuda.Stream(sync.device, priority=-1)
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._on_done: list[Callable[[], None]] = []

    def run(
        self, stages: Stages, result: Tensor, *, blocking: bool, on_done: Callable[[], None] = lambda: None
    ) -> None:
        """Reduce into `result`, then call `on_done`. If `blocking`, return when this is done."""
        if self._worker is None:
            wait_for_all(stages)
            on_done()
            return
        self._futures.append(self._worker.submit(stages, result=result, last=False))
        self._on_done.append(on_done)
        if blocking:
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is in flight. Call it on all ranks at the same point."""
        if not self._futures:
            return
        assert self._worker is not None
        self._worker.finish()
        futures, self._futures = self._futures, []
        following, self._on_done = self._on_done, []
        with waiting(self._sync):
            for future in futures:
                future.wait()
        for on_done in following:
            on_done()


class BetweenNodes:
    """CUDA: the stream in which a module is reduced between nodes, while the next module is reduced inside its node.

    At most two modules wait between the two phases: if links between nodes are slow, the next module waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._earlier, self._last = torch.cuda.Event(), torch.cuda.Event()

    def make_room(self) -> None:
        """Wait, in the stream that reduces inside the node, until there is room for another module."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._earlier)

    def reduced(self) -> None:
        """Note, in `stream`, that a module is done."""
        self._earlier.record(self.stream)
        self._earlier, self._last = self._last, self._earlier
