"""The Triton kernels against the reference, bit for bit, in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testing.kernels.cases import Case, core_cases, other_cases, quick_cases
from testing.processes.scripts import run_script

pytest.importorskip("triton", reason="triton is not installed")

NUM_PARTS = 2


def worker(which: str, part: int = 0, num_parts: int = 1) -> list[str]:
    command = ["-m", "testing.kernels.triton_worker", which, str(part), str(num_parts)]
    return run_script(command, timeout=280).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize(("which", "cases"), [("core", core_cases), ("other", other_cases)])
def test_every_byte_is_the_references(which: str, cases: Callable[[], list[Case]], part: int) -> None:
    expected = cases()[part::NUM_PARTS]
    assert worker(which, part, NUM_PARTS) == [f"cases: {len(expected)}"]


@pytest.mark.slow
def test_every_way_of_packing_gives_the_references_bytes() -> None:
    assert worker("quick") == [f"cases: {len(quick_cases())}"]


@pytest.mark.slow
def test_rotations_and_the_largest_of_chunks_are_the_references() -> None:
    assert worker("rows") == ["cases: 2"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["pairs", "triples"])
def test_sums_over_many_sources_and_dense_messages_are_the_references(which: str) -> None:
    """Groups of sources are added in a loop, the rest behind it: in rank order all the same."""
    assert worker(which) == ["cases: 2"]
