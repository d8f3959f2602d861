"""Checks that several configurations share."""

from __future__ import annotations

from lowbit_strategy.kernels.format import uniform


def check_bits(field: str, bits: object) -> None:
    """Raises:
    ValueError: Not 2 to 8.
    """
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"{field} must be an integer from 2 to 8, got {bits!r}")


def check_block_size(block_size: int) -> None:
    """Raises:
    ValueError: Not a power of two in the range of the formats.
    """
    uniform(8, block_size)


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises:
    ValueError: Not one of them.
    """
    if value not in choices:
        raise ValueError(f"{field} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_positive(field: str, value: object) -> None:
    """Raises:
    ValueError: Not an integer of at least 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} must be a positive integer, got {value!r}")
