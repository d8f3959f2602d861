"""How a launched script ends is how the launcher ends: exit status and signals pass through, both ways."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import psutil

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def end_as(call: Callable[..., Any], *args: Any) -> None:
    """Run Accelerate's launcher; leave with the script's status, ``128 + n`` if signal n ended it.

    Raises:
        SystemExit: The script failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        call(*args)
    except subprocess.CalledProcessError as error:
        _leave(error.returncode)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(error, file=sys.stderr)  # torchrun's summary: which rank, when, and where its log is
        _leave(failure.exitcode)
    except SignalException as error:
        _leave(-int(error.sigval))


def _leave(status: int) -> NoReturn:
    raise SystemExit(128 - status if status < 0 else status)


@contextlib.contextmanager
def forwarded_signals() -> Iterator[None]:
    """Signals sent to the launcher reach the processes it has started.

    torchrun does that itself, with handlers of its own; this is for the single process that Accelerate starts
    otherwise, which would be left behind.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _from_terminal():
            return  # Ctrl-C has reached the children already
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _from_terminal() -> bool:
    """Whether this process is in the foreground of a terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
