"""When an exchange fails, says what each rank was doing, in one message instead of the transport's words.

A rank whose exchange fails leaves a note of what it was doing in the store of the process group and reads the others'
notes. A rank that leaves no note within seconds has ended or is busy with something else.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist

_PATIENCE_S = 2.0  # after a lost connection: all others notice at once
_PATIENCE_AFTER_TIMEOUT_S = 10.0  # after a timeout: ranks began to wait at different times
_POLL_S = 0.05
_TIMEOUT = re.compile("timed out|timeout", re.IGNORECASE)  # gloo says it in several ways
_LIBRARIES = tuple(filter(None, (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))))
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_NUM_FRAMES = 6
_NO_MEMORY = "it ran out of memory"


class LostRankError(RuntimeError):
    """An exchange between ranks has failed: a rank has ended, or is doing something different from the others."""


@contextlib.contextmanager
def naming_lost_ranks(group: dist.ProcessGroup | None, what: str, place: str) -> Iterator[None]:
    """A context for an exchange: if it fails, the error names the ranks that did not take part.

    Args:
        group: The process group of the exchange in this context.
        what: Name of the exchange.
        place: Name of the step.

    Raises:
        LostRankError: The exchange has failed.
        OutOfMemoryError: This rank is out of memory; the others' errors name this rank.
    """
    try:
        yield
    except LostRankError:
        raise
    except torch.OutOfMemoryError:
        with contextlib.suppress(RuntimeError, OSError):  # the store may have ended: this rank's own error counts
            _default_store().set(_key(dist.get_rank()), f"{what} of {place}, where {_NO_MEMORY}")
        raise
    except RuntimeError as error:
        doing = f"{what} of {place}" if place else what
        raise LostRankError(_message(group, f"{doing}, in {_stack()}", str(error))) from error


def _message(group: dist.ProcessGroup | None, mine: str, error: str) -> str:
    notes = _exchange_notes(group, mine, error)
    reported = f"The transport reports{' a timeout' * _is_timeout(error)}: {error.splitlines()[0][:300]}"
    if notes is None:
        return (
            f"an exchange between ranks failed in {mine}. The store of the process group has ended as well, which is in"
            f" the launcher's or in rank 0's process: the first error is in the output of one of these. {reported}"
        )
    silent = [rank for rank, note in notes.items() if note is None]
    places = "; ".join(f"rank {rank} was in {note}" for rank, note in sorted(notes.items()) if note is not None)
    if silent:
        names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        advice = (
            f"{names} did not answer: ended, killed, or busy with something that the other ranks do not do. The first"
            " error is in that rank's output"
        )
    elif without := [rank for rank, note in notes.items() if note is not None and note.endswith(_NO_MEMORY)]:
        advice = f"rank {without[0]} had no memory left (OutOfMemoryError): use less there"
    else:
        advice = "all ranks answered: look for something that only some of them do, such as a validation"
    return f"an exchange between ranks failed. {places}. {advice}. {reported}"


def _is_timeout(error: str) -> bool:
    return _TIMEOUT.search(error) is not None


def _exchange_notes(group: dist.ProcessGroup | None, mine: str, error: str) -> dict[int, str | None] | None:
    """The note of each rank in the group, by global rank; None: it left none. If the store has ended with the process
    that held it, the result is None.
    """
    ranks = dist.get_process_group_ranks(group)
    notes: dict[int, str | None] = dict.fromkeys(ranks)
    notes[dist.get_rank()] = mine
    patience = _PATIENCE_AFTER_TIMEOUT_S if _is_timeout(error) else _PATIENCE_S
    try:
        store = _default_store()
        store.set(_key(dist.get_rank()), mine)
        deadline = time.monotonic() + patience
        while (silent := [rank for rank, note in notes.items() if note is None]) and time.monotonic() < deadline:
            for rank in silent:
                if store.check([_key(rank)]):
                    notes[rank] = store.get(_key(rank)).decode()
            time.sleep(_POLL_S)
    except (RuntimeError, OSError):
        return None
    return notes


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"lowbit_strategy/lost/{rank}"


def _stack() -> str:
    """Names of the functions on the stack of training, outermost first, without this package's."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    own, names = "", []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_PACKAGE, torch.__path__[0])):
            if not code.co_name.startswith(("_", "<", "wrap", "inner")) and code.co_name not in names:
                names.append(code.co_name)
            if not own and not code.co_filename.startswith((*_LIBRARIES, "<")):
                own = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    chain = " > ".join(reversed(names[:_NUM_FRAMES]))
    return f"{chain} ({own})" if own else chain
