"""Connecting is given up once one of the others has ended, and not before."""

from __future__ import annotations

import socket
import threading

import pytest

from lowbit_strategy.ranks.connecting import LOOK_S, connect_while_alive


def listening() -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


def _wait(event: threading.Event) -> None:
    event.wait(60)


def test_one_that_has_ended_is_not_waited_for() -> None:
    given_up = threading.Event()
    listener, address = listening()
    threading.Timer(LOOK_S, listener.close).start()
    with pytest.raises(RuntimeError, match=f"nobody listens at {address} any more"):
        connect_while_alive(lambda: _wait(given_up), [address])
    assert not given_up.is_set()
    given_up.set()


def test_those_who_live_are_waited_for() -> None:
    listener, address = listening()  # as one that is stopped: it accepts nothing, and its system does
    looked: list[bool] = []
    connect_while_alive(lambda: looked.append(threading.Event().wait(3 * LOOK_S)), [address])
    assert looked == [False]
    listener.close()


def test_what_fails_is_raised() -> None:
    def fail() -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        connect_while_alive(fail, [])
