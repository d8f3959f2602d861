"""Checks of block sizes and bits, which many compressors have."""

from __future__ import annotations

from lowbit_strategy.kernels.format import uniform


def check_bits(field: str, bits: int) -> None:
    """Raises:
    ValueError: Not 2 to 8.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"{field} must be an integer from 2 to 8, got {bits!r}")


def check_codes(block_size: int, **bits: int | None) -> None:
    """The block size, and fields by name that say how many bits a code has, or None.

    Raises:
        ValueError: Not a power of two in the range of the formats; or not 2 to 8.
    """
    uniform(8, block_size)
    for field, value in bits.items():
        if value is not None:
            check_bits(field, value)
