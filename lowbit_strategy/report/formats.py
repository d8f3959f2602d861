"""Figures as text."""

from __future__ import annotations


def number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"
