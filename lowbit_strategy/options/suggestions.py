"""The nearest valid name, for errors about unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that `name` is most like; None if it is like none: less than `likeness`, which is 1 for itself."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: ``"; did you mean 'loco'?"``, or a full stop."""
    near = nearest(name, known)
    return "." if near is None else f"; did you mean {near!r}?"
