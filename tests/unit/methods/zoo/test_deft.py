"""DEFT: every rank selects in parts of its own."""

from __future__ import annotations

import math

import pytest

from lowbit_strategy.methods.zoo.deft import assign_parts, parts_of


def test_parts_are_dealt_out_whole_and_evenly() -> None:
    sizes = [10, 5000, 300, 7, 20000, 1]
    parts = parts_of(sizes, 4)
    for view, size in enumerate(sizes):
        edges = [(start, stop) for which, start, stop in parts if which == view]
        assert edges[0][0] == 0
        assert edges[-1][1] == size
        assert [a[1] for a in edges[:-1]] == [b[0] for b in edges[1:]]
    norms = [float(index + 1) for index in range(len(parts))]
    assigned = assign_parts(sizes, norms, 0.01, 4, first_rank=3)
    assert sum(part.kept for part in assigned) == pytest.approx(0.01 * sum(sizes), rel=0.05)
    loads = [sum((p.stop - p.start) * math.log2(p.kept + 1) for p in assigned if p.rank == rank) for rank in range(4)]
    assert max(loads) < 1.3 * sum(loads) / 4
