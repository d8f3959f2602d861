"""One FIFO thread that reduces DDP's buckets while backward goes on, on CPU.

gloo's collectives must be issued in the same order on all ranks and never from a future's callback. One thread, one
queue and a process group that nothing else uses give that order; a fixed schedule keeps it while buckets overlap: a new
bucket is started (encoded, its bytes sent), then every older one is advanced by one stage, oldest first; after the last
bucket of a step all are finished.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending

_log = logging.getLogger("lowbit_strategy")

Stages = Iterator[Pending | None]


class _Job:
    __slots__ = ("_pending", "future", "result", "stages")

    def __init__(self, stages: Stages, result: Tensor, future: torch.futures.Future[Tensor]) -> None:
        self.stages = stages
        self.result = result
        self.future = future
        self._pending: Pending | None = None

    def advance(self) -> bool:
        """Wait for what travels, go on to the next exchange. Returns whether the bucket is done."""
        if self._pending is not None:
            self._pending.wait()
        try:
            self._pending = next(self.stages)
        except StopIteration:
            self.future.set_result(self.result)
            return True
        return False


class BucketWorker:
    """Runs stages of buckets in a fixed order. `submit` from the autograd thread, `close` at the end."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[_Job, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="lowbit-buckets", daemon=True)
        self._thread.start()

    def submit(self, stages: Stages, result: Tensor, *, last: bool) -> torch.futures.Future[Tensor]:
        """A future of `result`, set once `stages` are exhausted. `last`: the step has no more buckets."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._queue.put((_Job(stages, result, future), last))
        return future

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)

    def _loop(self) -> None:
        active: list[_Job] = []
        while (item := self._queue.get()) is not None:
            job, last = item
            active.append(job)
            try:
                self._advance(active, newest_first=True)
                while last and active:
                    self._advance(active, newest_first=False)
            except Exception as error:
                # torch hands on the text of an error in a future, without its traceback
                _log.error("reducing gradients failed", exc_info=error)
                for failed in active:
                    failed.future.set_exception(error)  # type: ignore[arg-type]  # as torch's own documentation
                active.clear()

    @staticmethod
    def _advance(active: list[_Job], *, newest_first: bool) -> None:
        order = [active[-1], *active[:-1]] if newest_first else list(active)
        for job in order:
            if job.advance():
                active.remove(job)
