"""The acceptance run for GPUs, on the parts that a CPU can show: every check passes or says why it was left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, run_script


@pytest.mark.slow
@pytest.mark.parametrize(("part", "only"), [("kernels", "hook"), ("kernels", "speed"), ("memory", "memory")])
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
