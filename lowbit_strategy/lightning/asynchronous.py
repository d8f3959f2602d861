"""Checkpoints that Lightning writes while training goes on. Independent of the Lightning namespace."""

from __future__ import annotations

from typing import Any

_CLASS = "AsyncCheckpointIO"


def finish_writing(checkpoint_io: Any) -> bool:
    """Whether checkpoints are written while training goes on; those that were begun are complete when this returns.

    Raises:
        BaseException: What has kept the last one from being written.
    """
    if not any(base.__name__ == _CLASS for base in type(checkpoint_io).__mro__):
        return False
    if checkpoint_io._executor is not None:  # one thread, so this comes after all that was begun
        checkpoint_io._executor.submit(bool).result()
    if checkpoint_io._error is not None:
        raise checkpoint_io._error
    return True
