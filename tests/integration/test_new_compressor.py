"""The page "Write a compressor": its file trains, and keeps the laws that every compressor keeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from lowbit_strategy import LoCo, extend, preset
from lowbit_strategy.register import strategy_names
from testing.invariants.harness import CONFIGURATIONS, LAYOUTS, Subject
from testing.invariants.run import CASES, Job, Report, run_jobs
from testing.pages import files
from testing.processes.ranks import run_ranks
from testing.processes.scripts import run_script

PAGE = "new-compressor.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def load(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("float8", folder / "float8.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["float8"] = module
    spec.loader.exec_module(module)


@pytest.mark.slow
def test_the_file_has_forty_lines_and_trains(folder: Path) -> None:
    assert sum(bool(line.strip()) for line in (folder / "float8.py").read_text().splitlines()) <= 40
    done = run_script("train.py", cwd=folder)
    assert "float8, error feedback (float8)" in done.stdout + done.stderr


def job(rank: int, world_size: int, folder: Path) -> Report:
    load(folder)
    CONFIGURATIONS["float8"] = preset("float8")
    jobs = []
    for layout in LAYOUTS:
        names = [name for name, case in CASES.items() if case.applies(Subject("float8", layout, world_size))]
        jobs.append(Job("float8", layout, tuple(names)))
    return run_jobs(rank, world_size, jobs, folder)


def test_it_keeps_every_law(folder: Path) -> None:
    report = run_ranks(job, 2, folder, timeout=280)[0]
    assert len(report) > 20
    assert {case: failures for case, failures in report.items() if failures} == {}


def test_names(folder: Path) -> None:
    names = {name for name, *_ in strategy_names()}
    with pytest.raises(ValueError, match="there is a compressor or outer rule called 'loco' already"):
        extend.register_compressor("loco", LoCo(bits=8))
    with pytest.raises(ValueError, match="there is a compressor or outer rule called 'diloco' already"):
        extend.register_compressor("diloco", LoCo(bits=8))
    with pytest.raises(ValueError, match="name must be lower-case letters, digits and underscores, got 'Mine'"):
        extend.register_compressor("Mine", LoCo(bits=8))
    extend.register_compressor("loco", preset("loco"))  # the same once more
    assert {name for name, *_ in strategy_names()} == names
