"""The launcher of the distributed tests: errors and hangs are reported, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from testing.processes.ranks import run_ranks
from testing.processes.scripts import run_script


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("about to fail")
        raise KeyError("the cause")
    dist.barrier()


def test_an_exception_names_the_rank_and_shows_its_traceback() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(_raise_on_one, 3)
    text = str(caught.value)
    assert "rank 1 raised" in text
    assert "KeyError: 'the cause'" in text
    assert "in _raise_on_one" in text
    assert "about to fail" in text
    assert text.index("rank 1 raised") == text.index("raised") - len("rank 1 ")  # the cause comes first


def _kill_self(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(AssertionError, match="rank 0 died of SIGKILL without a traceback"):
        run_ranks(_kill_self, 2)


def _hang_on_one(rank: int, world_size: int, folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    Path(folder, str(rank)).write_text(f"{os.getpid()} {child.pid}")
    if rank == 1:
        _wait_for_nothing()


def _wait_for_nothing() -> None:
    time.sleep(100)


def test_a_hang_is_reported_with_stacks_and_everything_is_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(_hang_on_one, 2, str(tmp_path), timeout=3, process_group=None)
    text = str(caught.value)
    assert "1 of 2 ranks still ran after 3 s" in text
    assert "stacks of rank 1" in text
    assert "in _wait_for_nothing" in text
    assert "stacks of rank 0" not in text
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_script_failure_shows_its_output() -> None:
    with pytest.raises(AssertionError, match="exited with status 3") as caught:
        run_script(["-c", "import sys; print('so far'); print('so bad', file=sys.stderr); sys.exit(3)"])
    assert "so far" in str(caught.value)
    assert "so bad" in str(caught.value)
    assert run_script(["-c", "import sys; sys.exit(3)"], check=False).returncode == 3


def test_script_that_ignores_sigterm_is_killed_with_its_stack() -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ndef stuck():\n  time.sleep(100)\nstuck()"
    )
    with pytest.raises(AssertionError, match="still ran after 2 s") as caught:
        run_script(["-c", code], timeout=2)
    assert "in stuck" in str(caught.value)
