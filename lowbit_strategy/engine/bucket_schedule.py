"""The order in which buckets are advanced, DDP's and those of a round of local steps, the same on all ranks.

A new bucket is started (encoded, its bytes sent), then every older one is advanced by one stage, oldest first; after
the last bucket of a step all are finished. So one bucket is encoded while another's bytes travel, and all
ranks issue collectives in the same order.

A bucket whose message is on its way to ranks far apart is not waited for until all buckets have left; the last ones
may have to sum inside a node before, and come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.engine.bucket import Stages


@dataclass(slots=True, eq=False)
class _Job:
    """A piece of a bucket.

    Args:
        stages: Reduce it.
        unfinished: The stages of all pieces that the future waits for.
        result: What the future gets.
        future: The bucket's.
    """

    stages: Stages
    unfinished: list[Stages]
    result: Tensor
    future: torch.futures.Future[Tensor]
    _pending: Pending | None = None

    @property
    def is_near(self) -> bool:
        """Whether it waits for a message that does not take long."""
        return self._pending is not None and not self.is_far

    @property
    def is_far(self) -> bool:
        """Whether what travels takes long."""
        return getattr(self._pending, "is_far", False)

    def advance(self) -> bool:
        """Wait for what travels, go on to the next exchange. Returns whether the bucket is done."""
        if self._pending is not None:
            self._pending.wait()
        try:
            self._pending = next(self.stages)
        except StopIteration:
            self.unfinished.remove(self.stages)
            if not self.unfinished:
                self.future.set_result(self.result)
            return True
        return False


class BucketSchedule:
    """The buckets that are in flight. All calls come from one thread (and, on CUDA, on one stream)."""

    def __init__(self) -> None:
        self._active: list[_Job] = []

    def start(
        self, pieces: Sequence[Stages], result: Tensor, future: torch.futures.Future[Tensor], *, last: bool
    ) -> None:
        """Start a bucket, advance the others; one piece after the other. `future` gets `result` once all are done."""
        unfinished = list(pieces)
        for stages in pieces:
            older = [job for job in self._active if not job.is_far] if self._active else []
            job = _Job(stages, unfinished, result, future)
            self._active.append(job)
            for each in (job, *older):
                if each.advance():
                    self._active.remove(each)
        if last:
            self.finish()

    def finish(self) -> None:
        """Advance all buckets until they are done, those that wait for near ranks first."""
        while self._active:
            near = [job for job in self._active if job.is_near] if len(self._active) > 1 else []
            for job in near or list(self._active):
                if job.advance():
                    self._active.remove(job)

    def fail(self, error: Exception) -> None:
        """Nothing that is in flight will end: whoever waits for it gets `error`."""
        failed, self._active = {job.future for job in self._active}, []
        for future in failed:
            future.set_exception(error)  # type: ignore[arg-type]  # as torch's own documentation
