"""The acceptance run for GPUs, on the parts that a CPU can show; and each of its checks broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor

from testing.processes.scripts import REPOSITORY, run_script

RUN = REPOSITORY / "benchmarks" / "gpu_acceptance" / "run.py"
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "only"),
    [
        ("kernels", ""),
        ("speed", "speed"),
        ("two_ranks", "launches"),
        ("two_ranks", "host wait"),
        ("interruptions", "resume"),
        ("interruptions", "fp16"),
        ("memory", ""),
        ("ranks", "loco_fsdp, bf16-mixed"),
        ("ranks_more", "mesh of one's own"),
    ],
)
def test_a_part_passes_and_writes_its_page(part: str, only: str, tmp_path: Path) -> None:
    run_script([RUN, "--part", part, "--only", only, "--folder", tmp_path], timeout=400)
    found = json.loads((tmp_path / "results.json").read_text())
    ((_, record),) = found["parts"].items()
    assert record["checks"]
    for check in record["checks"]:
        assert check["status"] == "passed" or (check["status"] == "left out" and check["why"]), check
        assert check["name"].replace("'", "&#x27;") in (tmp_path / "results.html").read_text()


def failed(check: Any) -> str:
    """Why a check failed, as the run reports it."""
    from benchmarks.gpu_acceptance.checks import run_checks

    (outcome,) = run_checks([check])
    assert outcome.status == "failed", outcome
    return outcome.why


def test_a_wrong_byte_is_reported() -> None:
    from benchmarks.gpu_acceptance import kernels
    from lowbit_strategy.collectives.comm import GroupComm

    original = GroupComm.all_to_all

    def flipped(self: GroupComm, out_WB: Tensor, x_WB: Tensor) -> Any:
        pending = original(self, out_WB, x_WB)
        pending.wait()
        out_WB.view(-1)[-3] ^= 0x10
        return pending

    (check,) = (each for each in kernels.CHECKS if "hook" in each.name)
    with mock.patch.object(GroupComm, "all_to_all", flipped):
        assert "differs" in failed(check)


def test_a_look_at_the_device_is_reported() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks.gpu_acceptance import two_ranks
    from lowbit_strategy.collectives.step_flags import StepFlags

    (check,) = (each for each in two_ranks.CHECKS if "host wait" in each.name)
    with mock.patch.object(StepFlags, "check_layout", lambda self, received, *_: received.cpu()):
        assert "HostWaits" in failed(check)


def test_kernels_and_steps_that_are_too_slow_are_reported() -> None:
    from benchmarks.gpu_acceptance.checks import Check
    from benchmarks.gpu_acceptance.ranks import compared
    from benchmarks.gpu_acceptance.speed import fast_enough

    figures = {"copy_gb_per_s": 3000.0, "rows": [{"name": "loco 4bit float32", "share_of_copy": 0.41}]}
    assert "0.41" in failed(Check(name="speed", run=lambda device: fast_enough(figures)))
    stock = {"losses": [2.0, 1.0], "step_s": 1.0, "peak_nbytes": 0}
    slow, bad = {**stock, "step_s": 1.3}, {**stock, "losses": [2.0, 1.5]}
    assert "1.30 of stock's time" in failed(Check(name="step", run=lambda device: compared(slow, stock, timed=True)))
    assert "stock's at 1.0" in failed(Check(name="loss", run=lambda device: compared(bad, stock, timed=True)))
    compared(slow, stock, timed=False)


def test_more_memory_than_announced_is_reported() -> None:
    from benchmarks.gpu_acceptance.checks import Check
    from benchmarks.gpu_acceptance.memory import no_more_than_announced

    def run(device: torch.device) -> dict[str, Any]:
        no_more_than_announced("fsdp", {"peak_gb": 12.0, "announced_gb": 1.0}, {"peak_gb": 9.0}, {})
        return {}

    assert "3.00 GB beyond the uncompressed run's, 1.00 GB were announced" in failed(Check(name="memory", run=run))


PART = """
import subprocess, sys, time
from benchmarks.gpu_acceptance.checks import Check, LeftOut

def fine(device):
    return {"ms": 1.23456}

def leaks(device):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[sys.argv.index("--folder") + 1] + "/leaked", "w").write(str(child.pid))
    return {}

def hangs(device):
    leaks(device)
    time.sleep(600)

def fails(device):
    raise AssertionError("ranks differ")

def cannot(device):
    raise LeftOut("no tool")

NAMES = {"fine": fine, "leaks": leaks, "hangs": hangs, "fails": fails, "cannot": cannot}
"""


class Part(NamedTuple):
    """What the command came to."""

    status: int
    checks: dict[str, dict[str, Any]]
    output: str


def run_part(folder: Path, *names: str, arguments: tuple[str, ...] = ()) -> Part:
    """A part with these checks, by the real command."""
    checks = ", ".join(f"Check(name={name!r}, run=NAMES[{name!r}])" for name in names)
    (folder / "made_up.py").write_text(f"{PART}\nCHECKS = ({checks},)\n")
    done = subprocess.run(
        [sys.executable, RUN, "--part", "made_up", "--folder", folder, *arguments],
        env={**os.environ, "PYTHONPATH": f"{folder}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads((folder / "results.json").read_text())
    checks = {each["name"]: each for each in found["parts"]["9_made_up"]["checks"]}
    return Part(done.returncode, checks, done.stdout)


def is_gone(folder: Path) -> bool:
    pid, until = int((folder / "leaked").read_text()), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_a_failure_hides_no_other_check_and_a_missing_tool_is_no_fault(tmp_path: Path) -> None:
    status, checks, output = run_part(tmp_path, "fails", "fine", "cannot")
    assert status == 1
    assert [check["status"] for check in checks.values()] == ["failed", "passed", "left out"]
    page = (tmp_path / "results.html").read_text()
    assert "ranks differ" in page
    assert "ms 1.235" in page
    assert output.strip().splitlines()[-1].startswith("| ")  # the row for docs/benchmarks.md
    assert run_part(tmp_path, "fine", "cannot").status == 0


def test_the_page_has_a_line_for_each_row_and_wraps_what_is_long(tmp_path: Path) -> None:
    """As it was looked at in a browser: no Python in it, nothing that leaves the page."""
    from benchmarks.gpu_acceptance.record import Record, write_page

    record = Record(tmp_path, "2_speed", fresh=True)
    rows = [{"name": "loco", "share_of_copy": 0.71234}, {"name": "decode", "share_of_copy": 0.9}]
    outcome = {"status": "passed", "why": "", "seconds": 1.0}
    record.put({"name": "speed", **outcome, "figures": {"rows": rows, "sizes": [1, 2.5]}})
    record.put({"name": "late", "status": "running", "why": "", "seconds": 0.0, "figures": {}})
    write_page(tmp_path)
    page = (tmp_path / "results.html").read_text()
    assert "rows \nname loco, share_of_copy 0.7123\nname decode, share_of_copy 0.9, sizes 1 2.5" in page
    assert "its process has not ended it" in page
    assert "overflow-wrap:anywhere" in page
    assert ("no GPU" in page) == (not torch.cuda.is_available())


@pytest.mark.slow
def test_a_process_that_is_left_is_reported_and_ended(tmp_path: Path) -> None:
    status, checks, _ = run_part(tmp_path, "leaks", "fine")
    assert status == 1
    assert checks["leaks"]["status"] == checks["fine"]["status"] == "passed"
    assert "processes were left" in checks["nothing is left running"]["why"]
    assert is_gone(tmp_path)


@pytest.mark.slow
def test_a_part_that_hangs_loses_nothing_and_is_continued(tmp_path: Path) -> None:
    status, checks, _ = run_part(tmp_path, "fine", "hangs", "cannot", arguments=("--limit", "25"))
    assert status == 1
    assert checks["fine"]["status"] == "passed"
    assert "more than 25 s" in checks["hangs"]["why"]
    assert "cannot" not in checks
    assert is_gone(tmp_path)
    seconds = checks["fine"]["seconds"]
    status, checks, output = run_part(tmp_path, "fine", "cannot", arguments=("--continue",))
    assert checks["fine"]["seconds"] == seconds
    assert "fine" not in output.partition("results.html")[0].replace("made_up", "")
    assert checks["cannot"]["status"] == "left out"


def test_a_driver_that_is_not_used_is_an_error(tmp_path: Path) -> None:
    from benchmarks.gpu_acceptance import machine

    if torch.cuda.is_available():
        pytest.skip("this machine's driver is used")
    with mock.patch.object(machine, "ROOT", tmp_path):
        assert machine.unused_driver() is None
        path = tmp_path / "proc" / "driver" / "nvidia" / "version"
        path.parent.mkdir(parents=True)
        path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1\n")
        sentence = machine.unused_driver()
    assert sentence is not None
    assert "470.1" in sentence
    assert "does not use it" in sentence


def test_operations_inside_of_another_are_no_launches_of_their_own() -> None:
    from benchmarks.gpu_acceptance.profiling import operations

    def operation(name: str, thread: int, start: float, duration: float) -> dict[str, object]:
        return {"cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": thread}

    copies = [operation("aten::_foreach_copy_", 1, 0, 10), operation("aten::copy_", 1, 1, 2)]
    others = [
        operation("aten::contiguous", 1, 10, 5),
        operation("aten::clone", 1, 11, 3),
        operation("aten::add_", 2, 1, 2),
    ]
    found = operations([*copies, *others, operation("aten::view", 2, 5, 1), operation("gloo:all_gather", 2, 6, 1)])
    assert [event["name"] for event in found] == ["aten::_foreach_copy_", "aten::clone", "aten::add_"]


def test_overlap_is_the_share_of_the_other_streams_time_beside_the_busiest() -> None:
    from benchmarks.gpu_acceptance.profiling import overlap

    def kernel(stream: int, start: float, duration: float) -> dict[str, object]:
        return {"cat": "kernel", "name": "k", "ts": start, "dur": duration, "args": {"stream": stream}}

    backward = [kernel(7, 0, 6), kernel(7, 5, 5)]  # busy from 0 to 10
    exchange = [kernel(9, 8, 3), kernel(9, 12, 1)]  # 4 long, of which 2 beside it
    assert overlap(backward + exchange, cuda=True) == pytest.approx(0.5)
    assert overlap(backward, cuda=True) == 0.0
    assert overlap(backward + exchange, cuda=False) == 0.0
