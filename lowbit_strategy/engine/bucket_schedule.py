"""The order in which the buckets of DDP or of a round advance, the same on all ranks.

A new bucket is started (encoded, its bytes sent), then every older one is advanced by one stage, oldest first; after
the last bucket of a step all are finished. So one bucket is encoded while another's bytes travel, and all ranks issue
collectives in the same order. No bucket waits for a message from far ranks until all buckets have been sent; buckets
that must still sum inside a node come first.

Ranks of one node reduce different parts of a bucket, with different numbers of exchanges, since a part may be empty. So
the next exchange inside the node waits for its turn (`TURN`), which depends only on the number of buckets.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Done, Pending, is_far

TURN = Done()  # nothing travels: the node's ranks begin the next exchange, inside the node, together
Stages = Iterator[Pending | None]
TURN_AFTER = 3  # in buckets: one sums inside the node, one travels to its owners, and one travels back


@dataclass(slots=True, eq=False)
class _Piece:
    """Stages that are advanced together: those of a bucket, or of a part of the first bucket.

    Args:
        stages: Reduce it.
        unfinished: The stages of all pieces that the future waits for.
        result: The future's result.
        future: The bucket's future.
    """

    stages: Stages
    unfinished: list[Stages]
    result: Tensor
    future: torch.futures.Future[Tensor]
    _pending: Pending | None = None

    @property
    def is_near(self) -> bool:
        """Whether it waits for a message from a near rank."""
        return self._pending is not None and not self.is_far

    @property
    def is_far(self) -> bool:
        """Whether it waits for a message from a far rank."""
        return is_far(self._pending)

    @property
    def awaits_turn(self) -> bool:
        return self._pending is TURN

    @property
    def awaits_others(self) -> bool:
        """Whether it waits for the last bucket of the pass."""
        return self._pending is None

    def advance(self) -> bool:
        """Wait for the current message, then start the next exchange. Return whether the bucket is done."""
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
    """The buckets that are in flight. All calls come from one thread (and, on CUDA, on one stream). If one raises, the
    futures of all buckets get the error, since nothing in flight will end.

    Args:
        turn_after: A bucket's turn comes when this many more have been started; None: after the last bucket.
        on_error: Called before the futures get an error.
    """

    def __init__(self, turn_after: int | None = None, on_error: Callable[[Exception], None] = lambda _: None) -> None:
        self._on_error = on_error
        self._active: list[_Piece] = []
        self._turn_after = turn_after
        self._untaken: deque[_Piece] = deque()  # the last `turn_after` pieces, whose turn has not come

    def start(
        self, pieces: Sequence[Stages], result: Tensor, future: torch.futures.Future[Tensor], *, last: bool
    ) -> None:
        """Start a bucket's pieces one by one, and advance the others. `future` gets `result` when all are done."""
        unfinished = list(pieces)
        with self._failing_together(future):
            for stages in pieces:
                self._start(_Piece(stages, unfinished, result, future))
        if last:
            self.finish()

    def _start(self, piece: _Piece) -> None:
        older = [each for each in self._active if not (each.is_far or each.awaits_turn)] if self._active else []
        self._active.append(piece)
        for each in (piece, *older):
            self._advance(each)
        if self._turn_after is not None:
            self._untaken.append(piece)
            if len(self._untaken) > self._turn_after:
                self._take_turn(self._untaken.popleft())

    def _advance(self, piece: _Piece) -> None:
        if piece.advance():
            self._active.remove(piece)

    def _take_turn(self, piece: _Piece) -> None:
        """Advance a piece until its turn, then let it take the turn. Pieces that wait for the last bucket have none."""
        while piece in self._active and not (piece.awaits_turn or piece.awaits_others):
            self._advance(piece)
        if piece.awaits_turn:
            self._advance(piece)

    def finish(self) -> None:
        """Advance all buckets until done: first those that wait for near ranks, then those that wait for a turn."""
        self._untaken.clear()
        with self._failing_together():
            while self._active:
                running = [piece for piece in self._active if not piece.awaits_turn]
                near = [piece for piece in running if piece.is_near] if len(running) > 1 else []
                for piece in near or running or list(self._active):
                    self._advance(piece)

    @contextlib.contextmanager
    def _failing_together(self, starting: torch.futures.Future[Tensor] | None = None) -> Iterator[None]:
        """A context whose error is passed to everything that waits. `starting`: a bucket of which some pieces may not
        have begun.
        """
        try:
            yield
        except Exception as error:
            self._on_error(error)
            failed, self._active = {piece.future for piece in self._active}, []
            if starting is not None and not starting.done():
                failed.add(starting)
            self._untaken.clear()
            for future in failed:
                future.set_exception(error)  # type: ignore[arg-type]  # as torch's own documentation
            raise
