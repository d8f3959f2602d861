"""The Triton kernels against the reference, bit for bit, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_cases import cases

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).parent / "triton_interpreter_worker.py"
NUM_PARTS = 4


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_byte_is_the_references(part: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), str(part), str(NUM_PARTS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    num_cases = len(range(part, len(list(cases())), NUM_PARTS))
    assert done.stdout.splitlines() == [f"cases: {num_cases}"]
