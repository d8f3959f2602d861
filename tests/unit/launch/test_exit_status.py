"""Exit status and signals of what was launched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lowbit_strategy.launch.launcher import end_as, forwarded_signals


def _child(exitcode: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=exitcode, error_file="none")
    return ChildFailedError("train.py", {1: failure})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (subprocess.CalledProcessError(7, "train.py"), 7),
        (subprocess.CalledProcessError(-signal.SIGSEGV, "train.py"), 128 + signal.SIGSEGV),
        (_child(7), 7),
        (_child(-signal.SIGKILL), 128 + signal.SIGKILL),
        (SignalException("asked to end", sigval=signal.SIGTERM), 128 + signal.SIGTERM),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_launcher_ends_as_the_script(error: Exception, status: int) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        end_as(fail)
    assert ended.value.code == status


def test_other_errors_are_errors() -> None:
    def fail() -> None:
        raise ConnectionError("port in use")

    with pytest.raises(ConnectionError):
        end_as(fail)


_CHILD = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(3))
print("up", flush=True)
time.sleep(60)
"""


def test_signals_reach_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with forwarded_signals():
        child: subprocess.Popen[Any] = subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        # Not the other children of this process, which serve other tests.
        monkeypatch.setattr(psutil.Process, "children", lambda self: [psutil.Process(child.pid)])
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        deadline = time.monotonic() + 30
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    assert child.returncode == 3
    assert signal.getsignal(signal.SIGTERM) == before
