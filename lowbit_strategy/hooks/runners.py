"""Runs buckets during training: in one FIFO thread on CPU, in a stream on CUDA.

gloo's collectives must be issued in the same order on all ranks, and never from a future's callback. One thread, one
queue and a dedicated process group ensure that order, and `BucketSchedule` keeps it while buckets overlap.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lowbit_strategy.engine.bucket_schedule import BucketSchedule, Stages

_log = logging.getLogger("lowbit_strategy")


class BucketRunner(Protocol):
    """Runs the stages of buckets, in the same order on all ranks."""

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        """Return a future of `result`, set when all stages have ended. `last`: the pass has no more buckets."""

    def close(self) -> bool:
        """Return whether no thread is left; False while one waits for a rank that never answers."""


class BucketWorker(BucketRunner):
    """A thread that runs the stages of buckets. Call `submit` from the autograd thread, and `close` at the end.

    Args:
        turn_after: See `BucketSchedule`.
    """

    def __init__(self, turn_after: int | None = None) -> None:
        self._schedule = BucketSchedule(turn_after, on_error=_log_error)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="lowbit-buckets", daemon=True)
        self._thread.start()

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._queue.put(functools.partial(self._schedule.start, pieces, result, future, last=last))
        return future

    def finish(self) -> None:
        """Finish all submitted buckets, because the backward pass has no more."""
        self._queue.put(self._schedule.finish)

    def close(self) -> bool:
        self._queue.put(None)
        if self._thread is threading.current_thread():  # if this thread garbage-collects the model
            return True
        self._thread.join(timeout=10)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (start := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # the futures get it
                start()
            del start  # keep nothing of a bucket while waiting for the next one


def _log_error(error: Exception) -> None:
    """Log an error with its traceback, which a future does not pass on."""
    _log.error("reducing gradients failed", exc_info=error)


class SideStream(BucketRunner):
    """CUDA: reduces buckets on a high-priority stream, in the same order as on CPU, without a thread."""

    def __init__(self, device: torch.device, turn_after: int | None = None) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)  # futures need a device with an index
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._schedule = BucketSchedule(turn_after)

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result.record_stream(self._stream)
            self._schedule.start(pieces, result, future, last=last)
        return future

    def close(self) -> bool:
        return True


class BlockingRunner(BucketRunner):
    """A runner whose `submit` of the last bucket returns when all results have arrived."""

    def __init__(self) -> None:
        self._schedule = BucketSchedule()

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[result.device] if result.is_cuda else None)
        self._schedule.start(pieces, result, future, last=last)
        return future

    def close(self) -> bool:
        return True


def bucket_runner(device: torch.device, turn_after: int | None = None) -> BucketRunner:
    return BucketWorker(turn_after) if device.type == "cpu" else SideStream(device, turn_after)
