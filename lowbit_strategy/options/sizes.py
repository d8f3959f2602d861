"""Bytes as text."""

from __future__ import annotations

_UNITS = ("B", "KB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Bytes with a decimal unit, such as ``1.5 MB``, as for `memory=` and links."""
    at = 0
    while abs(nbytes) >= 999.5 and at < len(_UNITS) - 1:
        nbytes, at = nbytes / 1000, at + 1
    return f"{nbytes:.3g} {_UNITS[at]}"
