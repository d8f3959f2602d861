"""What everyone is to see, such as the start-up report, whether or not logging has been set up."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("lowbit_strategy")


def _name_the_package(record: logging.LogRecord) -> bool:
    """Where nobody has set up logging a warning is a bare line: say whose it is."""
    if not _log.hasHandlers() and not str(record.msg).startswith("lowbit_strategy"):
        record.msg = f"lowbit_strategy: {record.msg}"
    return True


_log.addFilter(_name_the_package)


def inform(message: str, *values: object) -> None:
    """Log at the level INFO; where that would be lost because nobody has set up logging, write to standard error.

    A handler or a level of the logger ``lowbit_strategy``, or a handler of the root logger, is a set-up and decides.
    """
    if _log.hasHandlers() or _log.level != logging.NOTSET:
        _log.info(message, *values)
    else:
        print(message % values, file=sys.stderr)
