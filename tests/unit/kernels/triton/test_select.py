"""The Triton kernel of chunked selection against the reference, bit for bit, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest

from testing.kernels.chunk_cases import chunk_cases
from testing.processes.scripts import run_script

pytest.importorskip("triton", reason="triton is not installed")


def test_every_position_and_value_is_the_references() -> None:
    done = run_script(["-m", "testing.kernels.triton_select_worker"], timeout=280)
    assert done.stdout.splitlines() == [f"cases: {len(chunk_cases())}"]
