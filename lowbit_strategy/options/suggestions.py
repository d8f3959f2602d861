"""The nearest valid name, for errors about unknown ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# What other libraries and publications call an option, and its name here.
_ELSEWHERE = {
    "compress_ratio": "density",
    "every": "every_n_steps",
    "h": "every",
    "interval": "every",
    "k": "density",
    "local_steps": "every",
    "matrix_approximation_rank": "rank",
    "num_bits": "bits",
    "ratio": "density",
    "sparsity": "density",
    "start_powersgd_iter": "start_step",
    "steps": "every",
    "sync_every": "every",
}


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that `name` is most like, or is called elsewhere; None if it is like none.

    Args:
        name: Any text.
        known: Valid names.
        likeness: At least so much, 1 for the name itself.
    """
    choices = list(known)
    if (same := _ELSEWHERE.get(name.lower())) in choices:
        return same
    return next(iter(get_close_matches(name, choices, n=1, cutoff=likeness)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: ``"; did you mean 'loco'?"``, or a full stop."""
    near = nearest(name, known)
    return "." if near is None else f"; did you mean {near!r}?"


def unknown_option(of: str, name: str, known: Iterable[str], *, advice: str = "") -> TypeError:
    """The error for a name that a constructor does not know.

    Args:
        of: What is constructed.
        name: The unknown option.
        known: All options.
        advice: What to do instead, where that is known; else the nearest name, or all names, is given.
    """
    names = [each for each in known if each not in ("self", "args", "kwargs", "unknown")]
    hint = did_you_mean(name, names)
    if advice:
        return TypeError(f"{of} has no option {name!r}: {advice}")
    return TypeError(f"{of} has no option {name!r}{hint} Known: {', '.join(names)}")
