"""Waiting for others is given up once they can no longer answer, and not before."""

from __future__ import annotations

import socket
import threading

import pytest

from lowbit_strategy.elastic.lighthouse import answers, has_ended, watched

LOOK_S = 0.05


def test_who_has_ended_is_not_waited_for() -> None:
    forever = threading.Event()
    reasons = iter(["", "a", "", "b", "c"])
    with pytest.raises(RuntimeError, match=r"^c$"):
        watched(lambda: forever.wait(60), lambda: next(reasons), every=LOOK_S, num_looks=2)
    assert next(reasons, "all looked at") == "all looked at"
    forever.set()


def test_who_lives_is_waited_for() -> None:
    looks: list[str] = []

    def look() -> str:
        looks.append("")
        return ""

    assert watched(lambda: threading.Event().wait(10 * LOOK_S) or "answered", look, every=LOOK_S) == "answered"
    assert looks


def test_what_fails_is_raised() -> None:
    def fail() -> None:
        raise ValueError("closed by the other side")

    with pytest.raises(ValueError, match="closed by the other side"):
        watched(fail, lambda: "", every=LOOK_S)


def test_a_closed_port_has_ended_and_a_listener_that_accepts_nothing_has_not() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    assert answers("127.0.0.1", port)
    assert not has_ended(f"127.0.0.1:{port}")
    listener.close()
    assert not answers("127.0.0.1", port)
    assert has_ended(f"127.0.0.1:{port}")
