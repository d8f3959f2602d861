"""Splits a call's blocks over torch's number of threads. Blocks are independent, so the bytes are the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

import torch

GRAIN = 65536  # fewest elements for which another thread pays off
_PART = 4096
_T = TypeVar("_T")
_pools: dict[int, ThreadPoolExecutor] = {}

os.register_at_fork(after_in_child=_pools.clear)  # a forked child has none of the parent's threads


def _pool(num_threads: int) -> ThreadPoolExecutor:
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPoolExecutor(num_threads, thread_name_prefix="lowbit")
    return _pools[num_threads]


def run(work: Callable[[int, int], _T], num_blocks: int, block_size: int) -> list[_T]:
    """Run ``work(first, last)`` on parts of ``range(num_blocks)``, one in this thread and the rest in others.

    After an error or an interrupt, no other thread works on the call, so the caller owns its tensors again.
    """
    parts = max(1, min(torch.get_num_threads(), num_blocks * block_size // GRAIN))
    if parts == 1:
        return [work(0, num_blocks)]
    bounds = [num_blocks * part // parts for part in range(parts + 1)]
    pool, others = _pool(parts - 1), [Future[_T]() for _ in range(1, parts)]
    try:
        for other, (first, last) in zip(others, pairwise(bounds[1:]), strict=True):
            pool.submit(_fulfill, other, work, first, last)
        return [work(*bounds[:2]), *(other.result() for other in others)]
    except BaseException:
        wait([other for other in others if not other.cancel()])
        raise


def _fulfill(part: Future[_T], work: Callable[[int, int], _T], first: int, last: int) -> None:
    """Run the job unless `part` was canceled: `submit` can raise and still leave its job in the queue."""
    if part.set_running_or_notify_cancel():
        try:
            part.set_result(work(first, last))
        except BaseException as error:
            part.set_exception(error)


def run_on_elements(work: Callable[[int, int], _T], numel: int) -> list[_T]:
    """Run ``work(start, stop)`` on parts of ``range(numel)`` that start on multiples of 4,096."""
    return run(lambda first, last: work(first * _PART, min(last * _PART, numel)), -(-numel // _PART), _PART)
