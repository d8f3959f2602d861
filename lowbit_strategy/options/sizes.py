"""Bytes as text."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes with a decimal unit: ``1.5 MB``."""
    return _in_largest_unit(nbytes, 1000, ("B", "KB", "MB", "GB", "TB"), ".3g")


def binary_size(nbytes: float) -> str:
    """Bytes with a binary unit: ``1.50 MiB``."""
    return _in_largest_unit(nbytes, 1024, ("B", "KiB", "MiB", "GiB"), ".2f")


def _in_largest_unit(nbytes: float, base: int, units: tuple[str, ...], form: str) -> str:
    at = 0
    while abs(nbytes) >= base and at < len(units) - 1:
        nbytes, at = nbytes / base, at + 1
    return f"{nbytes:{form if at or form == '.3g' else '.0f'}} {units[at]}"
