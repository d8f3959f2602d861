"""Work that several threads share ends together, also when the caller is interrupted in the middle of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.native import threads
from lowbit_strategy.kernels.native.blocks import call_struct
from lowbit_strategy.kernels.segments import Segment, Segments

PARTS = 3
SIZE = 65536  # one block is enough for a thread


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(PARTS)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_parts() -> None:
    assert threads.run(lambda first, last: (first, last), 2 * PARTS, SIZE) == [(0, 2), (2, 4), (4, 6)]


def test_an_interrupt_waits_for_the_parts_that_have_begun() -> None:
    begun, go_on, ended = threading.Barrier(PARTS), threading.Event(), []

    def work(first: int, last: int) -> None:
        begun.wait(20)
        if first == 0:
            threading.Timer(0.1, go_on.set).start()
            raise KeyboardInterrupt
        go_on.wait(20)
        ended.append(first)

    with pytest.raises(KeyboardInterrupt):
        threads.run(work, PARTS, SIZE)
    assert sorted(ended) == [1, 2]


def test_an_error_of_another_thread_is_raised_here() -> None:
    def work(first: int, last: int) -> int:
        if first == 2:
            raise MemoryError("part 2")
        return first

    with pytest.raises(MemoryError, match="part 2"):
        threads.run(work, PARTS, SIZE)
    assert threads.run(lambda first, last: first, PARTS, SIZE) == [0, 1, 2]


class _FullPool(ThreadPoolExecutor):
    """Jobs wait for `go_on`; the second one is queued, and then raises as where no further thread can be started."""

    def __init__(self) -> None:
        super().__init__(1)
        self.go_on, self.jobs = threading.Event(), 0
        super().submit(self.go_on.wait, 20)

    def submit(self, *job: Any, **options: Any) -> Future[Any]:
        queued = super().submit(*job, **options)
        self.jobs += 1
        if self.jobs == 2:
            raise RuntimeError("can't start new thread")
        return queued


def test_what_was_queued_before_an_error_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ran = _FullPool(), []
    monkeypatch.setattr(threads, "_pools", {PARTS - 1: pool})
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threads.run(lambda first, last: ran.append(first), PARTS, SIZE)
    pool.go_on.set()
    pool.shutdown(wait=True)
    assert pool.jobs == 2
    assert not ran


@pytest.mark.skipif(not native.available(), reason="the C extension is not built")
@pytest.mark.parametrize("scaled", [True, False])
def test_a_call_keeps_what_its_pointers_point_to(scaled: bool) -> None:
    fmt, segments = uniform(4, 128), Segments([Segment(0, 128, 0, 0)])
    x, wire = torch.zeros(128), torch.zeros(1, fmt.wire_nbytes(128), dtype=torch.uint8)
    residual = torch.zeros(128, dtype=torch.int8 if scaled else torch.float32)
    scale = torch.zeros(1, dtype=torch.bfloat16) if scaled else None
    call, _ = call_struct(x, wire, segments, fmt, Feedback(residual, scale, 0.8))
    kept = [weakref.ref(each) for each in (x, wire, segments.table, residual, scale) if each is not None]
    del x, wire, segments, residual, scale
    gc.collect()
    assert all(each() is not None for each in kept)
    del call
    gc.collect()
    assert all(each() is None for each in kept)
