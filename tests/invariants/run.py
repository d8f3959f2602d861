"""All cases of many methods in one process group."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from lowbit_strategy.collectives.comm import GroupComm
from tests.invariants import state, sums
from tests.invariants.harness import GROUP_TIMEOUT, Case, Evidence, InvariantHarness, LayoutName

CASES = sums.CASES | state.CASES


class Job(NamedTuple):
    """A configuration under a layout, and the cases to run."""

    preset: str
    layout: LayoutName
    cases: tuple[str, ...]


Report = dict[tuple[str, str, str], list[str]]


def run_jobs(rank: int, world_size: int, jobs: Sequence[Job], folder: Path) -> Report:
    """All jobs in this process group: failures by (preset, layout, case), on rank 0. Checkpoints go to `folder`."""
    report: Report = {}
    comm = GroupComm(dist.new_group(timeout=GROUP_TIMEOUT))
    for job in jobs:
        harness = InvariantHarness(job.preset, job.layout, comm, folder)
        cases = {name: CASES[name] for name in job.cases}
        for collect in dict.fromkeys(case.collect for case in cases.values()):
            evidence = _gather(_attempt(collect, harness))
            raised = [f"rank {r} raised\n{e}" for r, e in enumerate(evidence) if isinstance(e, str)]
            for name, case in cases.items():
                if case.collect is collect and rank == 0:
                    report[job.preset, job.layout, name] = raised[:1] or _judge(case, evidence, harness)
            if raised:
                comm = harness.comm = GroupComm(dist.new_group(timeout=GROUP_TIMEOUT))
    return report


def _attempt(collect: Callable[[InvariantHarness], Evidence], harness: InvariantHarness) -> Evidence | str:
    try:
        return collect(harness)
    except Exception:
        return traceback.format_exc()


def _judge(case: Case, evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    try:
        return case.check(evidence, harness)
    except Exception:
        return [traceback.format_exc()]


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
