"""Checks of code sizes, for many compressors: elements of a block and bits of an element."""

from __future__ import annotations

from lowbit_strategy.kernels.format import uniform


def check_bits(field: str, bits: int) -> None:
    """Raise a ValueError if a value is not from 2 to 8."""
    if not 2 <= bits <= 8:
        raise ValueError(f"{field} must be an integer from 2 to 8, got {bits!r}")


def check_codes(block_size: int, **bits: int | None) -> None:
    """Check the block size, and the fields (by name) that give the bits of a code, or None.

    Raises:
        ValueError: The block size is not a power of two in the formats' range, or a field is not from 2 to 8.
    """
    uniform(8, block_size)
    for field, value in bits.items():
        if value is not None:
            check_bits(field, value)
