"""The end of the interpreter."""

from __future__ import annotations

from pathlib import Path

from testing.processes.scripts import run_script

ENDING = """
import sys, threading, time
import lowbit_strategy.collectives.comm

def want_the_gil():
    time.sleep(0.01)
    open(sys.argv[1], "w").close()

sys.setswitchinterval(1000)
threading.Thread(target=want_the_gil, daemon=True).start()
until = time.perf_counter() + 0.1
while time.perf_counter() < until:
    pass  # and keeps it
"""


def test_threads_that_want_the_gil_have_it_before_the_end(tmp_path: Path) -> None:
    marker = tmp_path / "had"
    run_script(["-c", ENDING, marker])
    assert marker.exists()
