"""The invariants of every registered compressor, under DDP's and FSDP2's layout, on 1, 2, 3 and 5 real processes.

One launch of processes per world size and layout serves all its selected tests. What is checked is in
`testing/invariants`; methods declare which laws they keep by `residual_gain`, `conserving`, `approaches_mean`,
`keeps_zeros` and `fixed_size`. A case that does not apply to a configuration is not collected for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testing.invariants.harness import CONFIGURATIONS, LAYOUTS, LayoutName, Subject
from testing.invariants.run import CASES, Job, Report, run_jobs
from testing.processes.ranks import run_ranks

WORLD_SIZES = (1, 2, 3, 5)  # one, even, odd with an empty shard, and more ranks than most tensors have rows
_reports: dict[tuple[int, LayoutName], Report | AssertionError] = {}


# One of each kind of message and residual. The others are made of parts that these have: three ranks show most.
EVERYWHERE = {
    "EF21, 4 bits",
    "LoCo, 1 bit after two steps",
    "LoCo, 2 bits up, 4 down",
    "dense",
    "dgc",
    "eden",
    "exdyna",
    "feedback in 8 bits",
    "gtopk",
    "loco",
    "multiscale",
    "onebitsgd",
    "powersgd",
    "qsgd",
    "randomk",
    "rotate",
    "sharedscale",
    "signsgd",
    "top-k of chunks, gathered",
    "topk",
    "warmup",
}


def _cases(world_size: int, layout: LayoutName, preset: str) -> tuple[str, ...]:
    """Ranks keep the same on two and on five as on three; cuts and sums differ."""
    subject = Subject(preset, layout, world_size)
    everything = world_size in (1, 3)
    return tuple(name for name, case in CASES.items() if (everything or case.cut_matters) and case.applies(subject))


def _items() -> Iterator[Any]:
    for world_size in WORLD_SIZES:
        for layout in LAYOUTS:
            for preset in sorted(CONFIGURATIONS):
                quick = world_size == 3 or (preset in EVERYWHERE and world_size != 2)
                yield pytest.param(world_size, layout, preset, marks=[] if quick else [pytest.mark.slow])


@pytest.fixture
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Failures of every job that the selected tests of this world size and layout ask for."""
    world_size, layout = launch = tuple(request.node.callspec.params[name] for name in ("world_size", "layout"))
    if launch not in _reports:
        wanted = [
            item.callspec.params["preset"]
            for item in request.session.items
            if isinstance(item, pytest.Function)
            and item.path == request.path
            and (item.callspec.params["world_size"], item.callspec.params["layout"]) == launch
        ]
        jobs = tuple(Job(preset, layout, _cases(world_size, layout, preset)) for preset in wanted)
        folder = tmp_path_factory.mktemp(f"invariants-{world_size}-{layout}")
        try:
            _reports[launch] = run_ranks(run_jobs, world_size, jobs, folder, timeout=280)[0]
        except AssertionError as error:  # quoted once, reported by each of its tests, and not tried again
            _reports[launch] = AssertionError(f"the launch of {world_size} processes failed: see the first error")
            raise error
    result = _reports[launch]
    if isinstance(result, AssertionError):
        pytest.fail(str(result), pytrace=False)
    return result


@pytest.mark.parametrize(("world_size", "layout", "preset"), list(_items()))
def test_invariants(world_size: int, layout: LayoutName, preset: str, report: Report) -> None:
    cases = _cases(world_size, layout, preset)
    assert cases
    failures = [f"{case}: {text}" for case in cases for text in report[preset, layout, case]]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
