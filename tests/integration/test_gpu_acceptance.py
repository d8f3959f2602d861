"""The acceptance run for GPUs, on the parts that a CPU can show: every check passes or says why it was left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, run_script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "only"),
    [
        ("kernels", "hook"),
        ("kernels", "speed"),
        ("two_ranks", "launches"),
        ("two_ranks", "host wait"),
        ("memory", "memory of"),
        ("memory", "resume"),
        ("memory", "fp16"),
    ],
)
def test_a_part_passes_and_writes_its_page(part: str, only: str, tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "gpu_acceptance" / "run.py"
    run_script([script, "--part", part, "--only", only, "--folder", tmp_path], timeout=280)
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert record["checks"]
    for check in record["checks"]:
        assert check["status"] == "passed" or (check["status"] == "left out" and check["why"]), check
        assert check["name"] in (tmp_path / "results.md").read_text()


def test_a_check_that_fails_is_reported_and_does_not_hide_the_others(tmp_path: Path) -> None:
    import torch

    from gpu_acceptance.checks import Check, run_checks, write

    def fails(device: torch.device) -> dict[str, object]:
        raise AssertionError("ranks differ")

    checks = (Check(name="bad", run=fails), Check(name="good", run=lambda device: {"ms": 1.23456}))
    outcomes = run_checks(checks)
    assert [outcome.status for outcome in outcomes] == ["failed", "passed"]
    write(outcomes, "part", tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "| bad | failed |" in page
    assert "ranks differ" in page
    assert "ms 1.235" in page


def test_operations_inside_of_another_are_no_launches_of_their_own() -> None:
    from gpu_acceptance.profiling import operations

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
    from gpu_acceptance.profiling import overlap

    def kernel(stream: int, start: float, duration: float) -> dict[str, object]:
        return {"cat": "kernel", "name": "k", "ts": start, "dur": duration, "args": {"stream": stream}}

    backward = [kernel(7, 0, 6), kernel(7, 5, 5)]  # busy from 0 to 10
    exchange = [kernel(9, 8, 3), kernel(9, 12, 1)]  # 4 long, of which 2 beside it
    assert overlap(backward + exchange, cuda=True) == pytest.approx(0.5)
    assert overlap(backward, cuda=True) == 0.0
    assert overlap(backward + exchange, cuda=False) == 0.0
