"""Shows messages such as the start-up report, whether or not logging has been set up."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

_log = logging.getLogger("lowbit_strategy")


def _name_the_package(record: logging.LogRecord) -> bool:
    """Add the package's name to warnings, which are bare lines if logging has not been set up."""
    if not _log.hasHandlers() and not str(record.msg).startswith("lowbit_strategy"):
        record.msg = f"lowbit_strategy: {record.msg}"
    return True


_log.addFilter(_name_the_package)


def listed(names: Sequence[object], most: int = 3) -> str:
    """The first of these names, and how many more there are."""
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def inform(message: str, *values: object) -> None:
    """Log at level INFO. If logging has not been set up and the message would be lost, write it to standard error.

    A handler or a level of the logger ``lowbit_strategy``, or a handler of the root logger, counts as a set-up.
    """
    if _log.hasHandlers() or _log.level != logging.NOTSET:
        _log.info(message, *values)
    else:
        print(message % values, file=sys.stderr)
