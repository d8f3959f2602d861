"""The invariants of every registered compressor, under DDP's and FSDP2's layout, on 1, 2, 3 and 5 real processes.

One launch of processes a world size serves all selected tests of it. What is checked is in `tests/invariants`;
methods say which laws they keep by `gain`, `conserving`, `approaches_mean` and `fixed_size`.
"""

from __future__ import annotations

import functools

import pytest

from tests.distributed import run_ranks
from tests.invariants.harness import CONFIGURATIONS, LAYOUTS
from tests.invariants.run import CASES, Job, Report, run_jobs

WORLD_SIZES = (1, 2, 3, 5)
_shown: dict[int, bool] = {}  # world sizes whose failed launch has been quoted in full


@functools.cache
def _report(world_size: int, jobs: tuple[Job, ...]) -> Report | AssertionError:
    try:
        return run_ranks(run_jobs, world_size, jobs, timeout=280)[0]
    except AssertionError as error:  # a failed launch is reported by each of its tests, and not tried again
        return error


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Failures of every job that the selected tests of this world size ask for."""
    wanted = request.node.callspec.params
    jobs = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and params.get("world_size") == wanted["world_size"] and "preset" in params:
            jobs[Job(params["preset"], params["layout"])] = None
    result = _report(wanted["world_size"], tuple(jobs))
    if isinstance(result, AssertionError):
        if not _shown.get(wanted["world_size"]):
            _shown[wanted["world_size"]] = True
            raise result
        pytest.fail(f"the launch of {wanted['world_size']} processes failed: see the first error", pytrace=False)
    return result


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("preset", sorted(CONFIGURATIONS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_invariant(world_size: int, layout: str, preset: str, case: str, report: Report) -> None:
    failures = report[preset, layout, case]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
