"""Amounts of memory as text."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes with a unit: ``1.5 MB``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
