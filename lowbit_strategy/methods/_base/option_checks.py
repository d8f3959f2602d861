"""Ranges that several configurations share; types are checked by `configuration` before."""

from __future__ import annotations

from lowbit_strategy.kernels.format import uniform


def check_bits(field: str, bits: int) -> None:
    """Raises:
    ValueError: Not 2 to 8.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"{field} must be an integer from 2 to 8, got {bits!r}")


def check_block_size(block_size: int) -> None:
    """Raises:
    ValueError: Not a power of two in the range of the formats.
    """
    uniform(8, block_size)


def check_positive(field: str, value: int) -> None:
    """Raises:
    ValueError: Less than 1.
    """
    if value < 1:
        raise ValueError(f"{field} must be a positive integer, got {value!r}")
