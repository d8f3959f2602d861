"""Connecting to others, one of whom may die meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable

LOOK_S = 0.5  # between two looks at who is still there
_ANSWER_S = 2.0


def connect_while_alive(connect: Callable[[], None], addresses: Iterable[str]) -> None:
    """Call `connect`, in a thread of its own; give it up once one of the others has ended.

    What is given up goes on until its own timeout, so that nothing of it may be used again.

    Args:
        connect: Waits for all others.
        addresses: ``host:port`` where each of the others listens for as long as it lives.

    Raises:
        RuntimeError: `connect` has failed, or nobody listens at an address any more.
    """
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            connect()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="lowbit-connect", daemon=True)
    thread.start()
    others = list(addresses)
    thread.join(LOOK_S)
    while thread.is_alive():
        for address in others:
            if _has_ended(address):
                raise RuntimeError(f"nobody listens at {address} any more")
        thread.join(LOOK_S)
    if errors:
        raise errors[0]


def _has_ended(address: str) -> bool:
    """Whether its system says that nobody listens there; one that does not answer may be slow."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
