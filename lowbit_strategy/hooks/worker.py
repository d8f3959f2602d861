"""What reduces buckets while training goes on: one FIFO thread on CPU, a stream on CUDA.

gloo's collectives must be issued in the same order on all ranks and never from a future's callback. One thread, one
queue and a process group that nothing else uses give that order, and `BucketSchedule` keeps it while buckets overlap.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.engine.bucket import Stages
from lowbit_strategy.engine.bucket_schedule import BucketSchedule
from lowbit_strategy.telemetry.step_times import StepClock

_log = logging.getLogger("lowbit_strategy")


class BucketWorker:
    """Runs stages of buckets. `submit` from the autograd thread, `close` at the end."""

    def __init__(self) -> None:
        self._schedule = BucketSchedule()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="lowbit-buckets", daemon=True)
        self._thread.start()

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        """A future of `result`, set once all stages are exhausted. `last`: the backward pass has no more buckets."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._queue.put(functools.partial(self._schedule.start, pieces, result, future, last=last))
        return future

    def finish(self) -> None:
        """The backward pass has no more buckets: all that were submitted will be reduced to the end."""
        self._queue.put(self._schedule.finish)

    def close(self) -> bool:
        """Whether the thread has ended; not so if it waits for a rank that does not come."""
        self._queue.put(None)
        self._thread.join(timeout=10)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            except Exception as error:
                # torch hands on the text of an error in a future, without its traceback
                _log.error("reducing gradients failed", exc_info=error)
                self._schedule.fail(error)
            del job  # nothing of a bucket is kept while the next one is waited for


class SideStream:
    """CUDA: buckets are reduced on a stream of high priority, in the same order as on CPU; no thread is needed."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)  # futures take no device without an index
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._schedule = BucketSchedule()

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        """As `BucketWorker.submit`."""
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result.record_stream(self._stream)
            self._schedule.start(pieces, result, future, last=last)
        return future


class OverlappedReducer:
    """Reduces the modules' shards while backward goes on, in the same order on all ranks.

    Args:
        device: Of gradients.
        clock: Is told when training waits for them.
    """

    def __init__(self, device: torch.device, clock: StepClock) -> None:
        self._clock = clock
        on_cpu = device.type == "cpu"
        self._worker = BucketWorker() if on_cpu else None
        self.stream = None if on_cpu else torch.cuda.Stream(device, priority=-1)
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._on_done: list[Callable[[], None]] = []
        self._waits = False  # at the end of the backward pass under way

    def run(
        self, stages: Stages, result: Tensor, *, blocking: bool, on_done: Callable[[], None] = lambda: None
    ) -> None:
        """Reduce into `result`, then call `on_done`. `blocking`: return when it is done."""
        if self._worker is None:
            wait_for_all(stages)
            on_done()
            return
        self._futures.append(self._worker.submit(stages, result=result, last=False))
        self._on_done.append(on_done)
        if blocking:
            self.finish()
        elif not self._waits:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._waits = False
        self.finish()

    def finish(self) -> None:
        """Wait until nothing is under way; on all ranks at the same point."""
        if not self._futures:
            return
        assert self._worker is not None
        self._worker.finish()
        futures, self._futures = self._futures, []
        following, self._on_done = self._on_done, []
        with self._clock.waiting():
            for future in futures:
                future.wait()
        for on_done in following:
            on_done()

    def close(self) -> bool:
        """True once the worker has stopped."""
        return self._worker is None or self._worker.close()
