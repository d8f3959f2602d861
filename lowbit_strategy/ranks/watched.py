"""Calls that wait for others, and are given up once those can no longer answer."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

_ANSWER_S = 5.0
_REFUSAL_S = 1.0  # comes at once, if it comes

T = TypeVar("T")


def watched(call: Callable[[], T], why_not: Callable[[], str], *, every: float, num_looks: int = 1) -> T:
    """The result of `call`, during which this thread still answers signals.

    It runs in a thread of its own. What is given up goes on until its own timeout, so that nothing of it may be used
    again.

    Args:
        call: May take long.
        why_not: Why nobody can answer any more; empty: somebody can. What it raises ends the wait.
        every: Seconds between two looks.
        num_looks: So many in a row must find a reason.

    Raises:
        RuntimeError: Nobody can answer any more.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="lowbit_strategy members").start()
    reasons: list[str] = []
    while len(reasons) < num_looks:
        wait([outcome], every)
        if outcome.done():
            return outcome.result()
        reason = why_not()
        reasons = [*reasons, reason] if reason else []
    raise RuntimeError(reasons[-1])


@contextlib.contextmanager
def noting_sigterm() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether SIGTERM has come since; a handler of the program's own is called as well.

    Frameworks' handlers only note the signal and answer it at the next batch, which a wait puts off. Where there is no
    handler the signal ends the process, as ever.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        handler(number, frame)

    signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, handler)


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there whom this machine reaches."""
    return _failure(host, port, _ANSWER_S) is None


def has_ended(address: str) -> bool:
    """Whether its system says that nobody listens at ``host:port``; one that does not answer may be slow."""
    host, _, port = address.rpartition(":")
    return isinstance(_failure(host, int(port), _REFUSAL_S), ConnectionRefusedError)


def _failure(host: str, port: int, timeout: float) -> OSError | None:
    try:
        socket.create_connection((host, port), timeout=timeout).close()
    except OSError as error:
        return error
    return None
