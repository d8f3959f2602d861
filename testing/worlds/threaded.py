"""W ranks in one process, each in a thread: for what waits in the middle of a step, such as controllers.

As `SimulatedWorld`, whose ranks take turns, but a collective returns once all ranks have come to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lowbit_strategy.collectives.comm import Done, Pending, wait_for_all
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from testing.worlds.simulated import Buffers, SimulatedWorld

TIMEOUT_S = 300.0


class ThreadedWorld(SimulatedWorld):
    """The same communicators; the last rank to come to a collective moves the bytes for all."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._move: Callable[[Buffers], None] | None = None
        self._barrier = threading.Barrier(size, action=self._exchange, timeout=TIMEOUT_S)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="rank")

    def post(self, rank: int, buffers: tuple[Any, Any], move: Callable[[Buffers], None]) -> Pending:
        self.posted[rank] = buffers
        self._move = move
        self._barrier.wait()
        return Done()

    def _exchange(self) -> None:
        assert self._move is not None
        self._move([self.posted[rank] for rank in range(self.size)])
        self.posted.clear()

    def reduce(
        self, syncs: Sequence[GradientSync], layout: BucketLayout, buffers: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """Reduce every rank's bucket into its `outs`; ends the step."""

        def run(rank: int) -> None:
            try:
                syncs[rank].begin_step()
                wait_for_all(syncs[rank].reduce(layout, buffers[rank], outs[rank]))
                syncs[rank].end_step()
            except BaseException:
                self._barrier.abort()  # or the others would wait for this one
                raise

        for future in [self._threads.submit(run, rank) for rank in range(self.size)]:
            future.result()

    def abort(self) -> None:
        """A rank has failed: let the others go."""
        self._barrier.abort()

    def close(self) -> None:
        self._threads.shutdown()
