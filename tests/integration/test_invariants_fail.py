"""Every invariant notices the fault that it is there for: with that fault the case fails, and by its check."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.method_state import MethodState
from testing.invariants import run
from testing.invariants.harness import LAYOUTS, Grads, InvariantHarness, LayoutName, Subject
from testing.invariants.run import CASES, Job, Report
from testing.processes.ranks import run_ranks

PRESET = "loco"


class _Patched(InvariantHarness):
    """A harness whose `reduce` hands over results that a fault has changed."""

    def __init__(self, change: Callable[[InvariantHarness, str, Tensor], Tensor], *args: Any) -> None:
        super().__init__(*args)
        self._change = change

    def reduce(self, sync: GradientSync, buckets: Sequence[Sequence[str]], grads: Grads, dtype: torch.dtype) -> Grads:
        means = super().reduce(sync, buckets, grads, dtype)
        self.num_buckets = len(buckets)
        return {name: self._change(self, name, mean) for name, mean in means.items()}


def _results(change: Callable[[Any, str, Tensor], Tensor]) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(run, "InvariantHarness", functools.partial(_Patched, change))


def _only(name: str, factor: float) -> Callable[[InvariantHarness, str, Tensor], Tensor]:
    return lambda harness, found, mean: mean * factor if found == name else mean


def _first_rank_differs(harness: InvariantHarness, name: str, mean: Tensor) -> Tensor:
    return mean.nextafter(torch.full_like(mean, torch.inf)) if harness.comm.rank == 0 else mean


def _one_bucket_differs(harness: Any, name: str, mean: Tensor) -> Tensor:
    return mean.nextafter(torch.full_like(mean, torch.inf)) if harness.num_buckets > 1 and name == "cube" else mean


def _one_byte_uncounted(harness: InvariantHarness, name: str, mean: Tensor) -> Tensor:
    harness.comm.sent_nbytes -= name == "matrix"
    return mean


def _only_zeros(harness: InvariantHarness, name: str, mean: Tensor) -> Tensor:
    return mean + (mean == 0) * 1e-30 if name == "tall" else mean


@contextlib.contextmanager
def _no_rollback() -> Iterator[None]:
    sync = InvariantHarness.sync
    with mock.patch.object(InvariantHarness, "sync", lambda self, *args, **options: sync(self, *args)):
        yield


@contextlib.contextmanager
def _residuals_lost_in_files() -> Iterator[None]:
    save = residual_files.save

    def lossy(path: Path, saved: dict[str, Any]) -> residual_files.Place:
        for entry in saved["parameters"].values():
            for tensor in entry["tensors"].values():
                tensor.zero_()
        return save(path, saved)

    with mock.patch.object(residual_files, "save", lossy):
        yield


@contextlib.contextmanager
def _residuals_lost_in_switches() -> Iterator[None]:
    with mock.patch.object(MethodState, "carry_over_"):
        yield


FAULTS: dict[str, contextlib.AbstractContextManager[object]] = {
    "conservation": _results(_only("tall", 1.001)),
    "agreement": _results(_first_rank_differs),
    "bytes": _results(_one_byte_uncounted),
    "exempt": _results(_only("odd", 1.001)),
    "mean": _results(_only("matrix", 1.1)),
    "dtypes": _results(lambda harness, name, mean: mean.float()),
    "nonfinite": _results(lambda harness, name, mean: mean.nan_to_num()),
    "rollback": _no_rollback(),
    "resume": _residuals_lost_in_files(),
    "buckets": _results(_one_bucket_differs),
    "zero": _results(lambda harness, name, mean: mean + (mean == 0).all() * 1e-30),
    "zeros": _results(_only_zeros),
    "regroup": _residuals_lost_in_switches(),
}


def _run_faulty(rank: int, world_size: int, folder: Path) -> Report:
    report: Report = {}
    for case, fault in FAULTS.items():
        jobs = [Job(PRESET, layout, (case,)) for layout in LAYOUTS if _applies(case, layout)]
        with fault:
            report |= run.run_jobs(rank, world_size, jobs, folder)
    return report


def _applies(case: str, layout: LayoutName) -> bool:
    return CASES[case].applies(Subject(PRESET, layout, 2))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run_ranks(_run_faulty, 2, tmp_path_factory.mktemp("faulty"))[0]


def test_every_case_has_a_fault() -> None:
    assert FAULTS.keys() == CASES.keys()


@pytest.mark.parametrize(("case", "layout"), [(c, layout) for c in CASES for layout in LAYOUTS if _applies(c, layout)])
def test_a_fault_fails_its_case(case: str, layout: LayoutName, report: Report) -> None:
    failures = report[PRESET, layout, case]
    assert failures
    assert not [text for text in failures if "Traceback" in text], "noticed by its check, not by an accident"
