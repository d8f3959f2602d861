"""The launcher of the distributed tests: values come back, errors and hangs are reported, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from testing.processes.ranks import _Run, run_ranks
from testing.processes.scripts import run_script


def _all_reduce(rank: int, world_size: int, start: torch.Tensor) -> torch.Tensor:
    x = start + rank
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("process_group", ["file", "env"])
def test_every_ranks_value_comes_back_in_order(process_group: str) -> None:
    results = run_ranks(_all_reduce, 3, torch.tensor([10.0]), process_group=process_group)
    assert [r.item() for r in results] == [33.0, 33.0, 33.0]


def _surroundings(rank: int, world_size: int) -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "ADDED", "HOME")
    return {"threads": torch.get_num_threads(), "group": dist.is_initialized()} | {n: os.environ.get(n) for n in names}


def test_environment_of_a_rank() -> None:
    results = run_ranks(_surroundings, 2, process_group=None, env={"ADDED": "yes", "HOME": None})
    assert results[1] == {
        "threads": 1,
        "group": False,
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "ADDED": "yes",
        "HOME": None,
    }
    assert "RANK" not in os.environ
    assert "HOME" in os.environ


def _variable_on_start(rank: int, world_size: int, name: str) -> str | None:
    code = Path(f"/proc/{os.getpid()}/environ").read_bytes().split(b"\0")
    return next((v.decode() for v in code if v.startswith(name.encode() + b"=")), None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_extra_variables_are_there_before_the_interpreter_starts() -> None:
    assert run_ranks(_variable_on_start, 1, "ADDED", env={"ADDED": "yes"}) == ["ADDED=yes"]


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
        run_ranks(_hang_on_one, 2, str(tmp_path), timeout=10, process_group=None)
    text = str(caught.value)
    assert "1 of 2 ranks still ran after 10 s" in text
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


def _unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(AssertionError, match="rank 0 raised"):
        run_ranks(_unpicklable, 1)


def test_a_rank_that_failed_before_anyone_looked_is_reported(tmp_path: Path) -> None:
    run = _Run(tmp_path, 1, timeout=10)
    run.start(_unpicklable, (), None, None)
    try:
        run.processes[0].join()
        assert "rank 0 raised" in run.wait()
    finally:
        run.kill()


def test_script_output_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os, sys\nprint('hello', sys.argv[1], os.environ['ADDED'])\n")
    done = run_script([script, "you"], env={"ADDED": "yes"})
    assert done.stdout == "hello you yes\n"


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


def test_script_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    line = 'os.write(1, (os.environ["RANK"] + "/" + os.environ["WORLD_SIZE"] + "\\n").encode())'
    script.write_text(f"import os\n{line}\n")  # in one write, which no other rank's can come between
    assert sorted(run_script(script, 2).stdout.split()) == ["0/2", "1/2"]


def test_torchrun_cannot_run_any_command() -> None:
    with pytest.raises(ValueError, match="world_size=1"):
        run_script(["true"], 2)
