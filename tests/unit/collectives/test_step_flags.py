"""A broken layout is reported however far the host is ahead of the device."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from lowbit_strategy.collectives.step_flags import StepFlags

pytest.importorskip("triton", reason="triton is not installed")

from testing.cuda.host_code import CUDA, on_cuda
from testing.worlds.echo import Operations


class _LateEvent:
    """Of a device that is `BEHIND` steps late: what has been recorded happens after so many looks."""

    BEHIND = 3

    def __init__(self) -> None:
        self.records = 0
        self._left = 0

    def record(self) -> None:
        self.records += 1
        self._left = self.BEHIND

    def query(self) -> bool:
        self._left -= 1
        return self._left <= 0


def test_a_copy_that_is_under_way_is_waited_for_and_then_read() -> None:
    with on_cuda(), patch("torch.cuda.Event", _LateEvent):
        flags = StepFlags(CUDA)
        flags.raise_if_broken(rank=0)
        event = flags._copied
        assert isinstance(event, _LateEvent)
        for _ in range(_LateEvent.BEHIND - 1):
            flags.raise_if_broken(rank=0)
        assert event.records == 1
        with pytest.raises(
            DataDependentOutputException
        ):  # here the host looks at the number, which a fake tensor lacks
            flags.raise_if_broken(rank=0)


def test_on_the_cpu_it_is_an_error_at_once() -> None:
    flags = StepFlags(torch.device("cpu"))
    header = torch.arange(16, dtype=torch.uint8)
    received = header.expand(3, -1).clone()
    flags.check_layout(received, header, rank=0)
    received[2, 5] += 1
    with pytest.raises(RuntimeError, match="rank 2 sent a message with a different layout than rank 0"):
        flags.check_layout(received, header, rank=0)


def test_a_look_at_headers_is_two_operations_for_a_bucket() -> None:
    """There are hundreds of buckets in a step, and each operation is a kernel that the host starts."""
    flags = StepFlags(torch.device("cpu"))
    header = torch.arange(16, dtype=torch.uint8)
    received = torch.cat([header, torch.ones(32, dtype=torch.uint8)]).repeat(8, 1)
    flags.note_layout(received, header)  # makes room
    with Operations() as operations:
        flags.note_layout(received, header)
    looks = ("view", "slice", "detach", "alias")
    kernels = [name for name in operations.names if not any(look in name for look in looks)]
    assert len(kernels) == 2, kernels
    assert flags.broken().item() == 0
    received[5, 4] += 1
    flags.note_layout(received, header)
    received[5, 4] -= 1
    flags.note_layout(received, header)
    assert flags.broken().item() == 6
    received[6, 1] += 1
    flags.note_layout(received, header)
    assert flags.broken().item() == 7


def test_the_last_step_is_looked_at_where_no_other_follows() -> None:
    flags, header = StepFlags(torch.device("cpu")), torch.arange(8, dtype=torch.uint8)
    flags.raise_if_broken(0, waits=True)
    flags.note_layout(torch.stack([header, header + 1]), header)
    flags.raise_if_broken(0)
    with pytest.raises(RuntimeError, match="rank 1 sent a message with a different layout than rank 0 expects"):
        flags.raise_if_broken(0, waits=True)
