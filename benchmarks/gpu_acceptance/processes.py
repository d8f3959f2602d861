"""A part of the acceptance run in a session of its own: when it ends, or is out of time, nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Args:
        returncode: Its status; None: it was out of time.
        left: What it had started and not ended, in words; it has been killed.
    """

    returncode: int | None
    left: tuple[str, ...]


def supervise(command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command for `limit_s` seconds at most, then kill what is left of its session, and nothing else."""
    process = subprocess.Popen(command, start_new_session=True, env=None if env is None else {**os.environ, **env})
    try:
        returncode: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        returncode = None
    deadline = time.monotonic() + (GRACE_S if returncode is not None else 0)
    while of_session(process.pid) and time.monotonic() < deadline:  # servers end when they see that nobody needs them
        time.sleep(0.1)
    left = kill_session(process.pid)
    process.wait()
    return Ended(returncode, tuple(text for pid, text in left if pid != process.pid))


def kill_session(session: int) -> list[tuple[int, str]]:
    """Kill the processes of a session; their ids and command lines."""
    killed: list[tuple[int, str]] = []
    for process in of_session(session):
        with contextlib.suppress(psutil.Error):
            killed.append((process.pid, f"{process.pid}: {' '.join(process.cmdline())[:200]}"))
            process.kill()
    return killed


def of_session(session: int) -> list[psutil.Process]:
    """Those that still run."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_python(command: Sequence[str], limit_s: float, env: Mapping[str, str], cwd: str | os.PathLike[str]) -> str:
    """Standard output of a command of a check, in the session of its part.

    Raises:
        AssertionError: It failed or was out of time; the text has its output.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.send_signal(signal.SIGKILL)
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(command)} took more than {limit_s:.0f} s:\n{out}\n{err}") from None
    if process.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {process.returncode}:\n{out}\n{err}")
    return out
