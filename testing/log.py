"""What the package logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def listen() -> Iterator[list[str]]:
    """The lines that the package logs."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(record.getMessage().splitlines())

    log, listener = logging.getLogger("lowbit_strategy"), Listener()
    level = log.level
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
