"""Quantities as a user writes them."""

from __future__ import annotations

import pytest

from lowbit_strategy.advisor.quantities import count, duration, rate, size


def test_quantities() -> None:
    assert rate("10gbit") == rate("10 Gbit/s") == rate("10Gbps") == rate("1.25GB/s") == 1.25e9
    assert rate("1Gb/s") == rate("1gbps") == rate("125 MB/s") == 1.25e8
    assert [duration(text) for text in ("0.1ms", "100µs")] == pytest.approx([1e-4, 1e-4])
    assert size("80GB") == 80e9
    assert count("7B") == count("7e9") == 7e9
