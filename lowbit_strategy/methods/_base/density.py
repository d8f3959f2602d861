"""The fraction of elements that sparse methods send."""

from __future__ import annotations


def check_density(density: float, field: str = "density") -> None:
    """Raises:
    ValueError: The density is not in (0, 1].
    """
    if not 0.0 < density <= 1.0:
        raise ValueError(f"{field} must be in (0, 1] (0.01 keeps one element in a hundred), got {density!r}")


def num_kept(density: float, numel: int) -> int:
    """Number of elements to send out of `numel`: at least one, if there are any."""
    return min(numel, max(1, round(density * numel)))
