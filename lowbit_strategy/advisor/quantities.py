"""Reads quantities: bandwidths, times, sizes and counts."""

from __future__ import annotations

import re

_BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
_RATE = "a bandwidth such as 10gbit or 300GB/s"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SMALLEST, _LARGEST = 1e-9, 1e15  # bytes, seconds or bytes per second beyond these are typing errors


def rate(text: str) -> float:
    """Bytes per second, of bits (``10gbit``, ``1Gbps``, ``1 Gb/s``) or bytes (``125MB/s``) per second."""
    plain = re.sub(r"(/s|ps)\s*$", "", text)
    if re.search(r"[kKmMgGtT]B\s*$", plain):
        return _parse(text, plain.lower(), _BYTES, _RATE)
    return _parse(text, re.sub(r"([kmgt])b\s*$", r"\1bit", plain.lower()), _BITS, _RATE)


def duration(text: str) -> float:
    """Seconds."""
    return _parse(text, text.lower(), _TIMES, "a time such as 0.9s, 0.1ms or 50us")


def size(text: str) -> float:
    """Bytes."""
    return _parse(text, text.lower(), _BYTES, "an amount of memory such as 80GB")


def count(text: str) -> float:
    """A number."""
    return _parse(text, text.lower(), _COUNTS, "a number such as 7e9 or 7B")


def _parse(text: str, plain: str, units: dict[str, float], what: str) -> float:
    """Parse `plain`; raise a ValueError if it is not a positive quantity with one of the units."""
    match = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*([a-zµμ]*)\s*", plain)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity: give {what}")
    if match[2] not in units:
        raise ValueError(f"{text!r} has no known unit: give {what}")
    value = float(match[1]) * units[match[2]]
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"{text!r} is too {'small' if value < _SMALLEST else 'large'}: give {what}")
    return value
