"""All cases of many methods in one process group."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from lowbit_strategy.collectives.comm import Comm, GroupComm
from testing.invariants import state, sums
from testing.invariants.harness import GROUP_TIMEOUT, Case, Evidence, InvariantHarness, LayoutName

CASES = sums.CASES | state.CASES


class Job(NamedTuple):
    """A configuration under a layout, and the cases to run."""

    preset: str
    layout: LayoutName
    cases: tuple[str, ...]


Collect = Callable[[InvariantHarness], Evidence]
Report = dict[tuple[str, str, str], list[str]]


def run_jobs(rank: int, world_size: int, jobs: Sequence[Job], folder: Path) -> Report:
    """All jobs in this process group: failures by (preset, layout, case), on rank 0. Checkpoints go to `folder`."""
    report: Report = {}
    comm: Comm = GroupComm(dist.new_group(timeout=GROUP_TIMEOUT))
    for job in jobs:
        harness = InvariantHarness(job.preset, job.layout, comm, folder)
        evidence = _collect([CASES[name].collect for name in job.cases], harness)
        comm = harness.comm
        if rank == 0:
            for name in job.cases:
                found = evidence[CASES[name].collect]
                report[job.preset, job.layout, name] = (
                    [found] if isinstance(found, str) else _judge(CASES[name], found, harness)
                )
    return report


def _collect(collects: Iterable[Collect], harness: InvariantHarness) -> dict[Collect, list[Evidence] | str]:
    """What all ranks recorded, by function, or what the first of them raised; on rank 0.

    All functions are run before the ranks meet. If one raised, each is run by itself, in a fresh group after failures.
    """
    collects = list(dict.fromkeys(collects))
    found = _attempt(collects, harness)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, found if isinstance(found, str) else None)
    raised = [f"rank {r} raised\n{error}" for r, error in enumerate(errors) if error is not None]
    if not raised:
        ranks = _gather(found)
        return {collect: [own[i] for own in ranks] for i, collect in enumerate(collects)}
    harness.comm = GroupComm(dist.new_group(timeout=GROUP_TIMEOUT))
    if len(collects) == 1:
        return {collects[0]: raised[0]}
    evidence: dict[Collect, list[Evidence] | str] = {}
    for collect in collects:
        evidence |= _collect([collect], harness)
    return evidence


def _attempt(collects: Sequence[Collect], harness: InvariantHarness) -> list[Evidence] | str:
    try:
        return [collect(harness) for collect in collects]
    except Exception:
        return traceback.format_exc()


def _judge(case: Case, evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    try:
        return case.check(evidence, harness)
    except Exception:
        return [traceback.format_exc()]


def _gather(value: Any) -> list[Any]:
    """Those of all ranks, on rank 0."""
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []
