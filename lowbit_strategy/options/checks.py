"""Checks of options beyond their types."""

from __future__ import annotations


def check_positive(field: str, value: int) -> None:
    """Raise a ValueError if the value is less than 1."""
    if value < 1:
        raise ValueError(f"{field} must be a positive integer, got {value!r}")
