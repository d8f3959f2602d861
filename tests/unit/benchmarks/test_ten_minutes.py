"""What a short loan of a GPU is spent on."""

from __future__ import annotations

import importlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_acceptance import ten_minutes
from benchmarks.gpu_acceptance.ten_minutes import ORDER, Wanted, newly_shown, pack, shown_so_far, spend


@pytest.mark.parametrize("wanted", ORDER, ids=lambda wanted: wanted.name)
def test_every_wanted_check_exists(wanted: Wanted) -> None:
    checks = importlib.import_module(f"benchmarks.gpu_acceptance.{wanted.part}").CHECKS
    assert wanted.name in [check.name for check in checks]


def spent(minutes: float, shown: tuple[str, ...] = (), share: float = 1.0) -> list[str]:
    """Each check takes a share of what it may."""
    now = 0.0

    def run(wanted: Wanted, left: float) -> None:
        nonlocal now
        assert wanted.seconds <= left
        now += share * wanted.seconds

    done = spend(60 * minutes, run, shown, lambda: now)
    assert now <= 60 * minutes
    return [wanted.name for wanted in done]


def test_time_is_spent_in_order_on_what_has_not_been_shown() -> None:
    names = [wanted.name for wanted in ORDER]
    assert spent(1000) == names
    assert spent(1000, shown=(names[0], names[3])) == [names[1], names[2], *names[4:]]
    assert spent(1000, shown=tuple(names)) == []
    ten = spent(10)
    assert ten[0] == names[0]
    assert 3 < len(ten) < len(names)
    assert ten == [name for name in names if name in ten]
    assert len(spent(10, share=0.5)) > len(ten)


def results(kind: str) -> dict[str, Any]:
    checks = [{"name": "a", "status": "passed"}, {"name": "b", "status": "failed"}, {"name": "c", "status": "left out"}]
    return {"machine": {"kind": kind, "device": "a GPU"}, "parts": {"1_kernels": {"checks": checks}}}


def test_only_a_gpu_shows_and_only_what_has_passed() -> None:
    assert list(newly_shown(results("cuda"))) == ["a"]
    assert newly_shown(results("cuda"))["a"].startswith("a GPU, 2")
    assert newly_shown(results("cpu")) == {}


def test_one_archive_has_the_results_and_what_has_been_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = tmp_path / "gpu_shown.json"
    committed.write_text('{"z": "before"}')
    monkeypatch.setattr(ten_minutes, "SHOWN", committed)
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "results.html").write_text("page")
    with tarfile.open(pack(folder, results("cuda"))) as packed:
        assert {"results/results.html", "results/gpu_shown.json"} <= set(packed.getnames())
    assert list(json.loads((folder / "gpu_shown.json").read_text())) == ["a", "z"]


def test_what_is_said_to_be_shown_are_checks() -> None:
    parts = ("kernels", "speed", "two_ranks", "interruptions", "memory", "methods", "ranks", "ranks_more")
    names = {
        check.name for part in parts for check in importlib.import_module(f"benchmarks.gpu_acceptance.{part}").CHECKS
    }
    assert set(shown_so_far()) <= names
