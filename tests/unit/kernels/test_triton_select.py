"""The Triton kernel of chunked selection against the reference, bit for bit, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kernels.chunk_cases import chunk_cases

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).parent / "triton_select_worker.py"


def test_every_position_and_value_is_the_references() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"cases: {len(chunk_cases())}"]
