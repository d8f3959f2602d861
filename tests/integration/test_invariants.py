"""The invariants of every registered compressor, under DDP's and FSDP2's layout, on 1, 2, 3 and 5 real processes.

One launch of processes per world size and layout serves all its selected tests. What is checked is in
`testing/invariants`; methods declare which laws they keep by `residual_gain`, `keeps_zero_rows` and `fixed_size`. The
laws hold to rounding error for the form of a compressor that gives nothing away (`conserving_form`). A case that does
not apply to a configuration is not collected for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from testing.invariants.harness import CONFIGURATIONS, LAYOUTS, LayoutName, Subject
from testing.invariants.run import CASES, Job, Report, run_jobs
from testing.processes.ranks import run_ranks

WORLD_SIZES = (1, 2, 3, 5)  # one, even, odd with an empty shard, and more ranks than most tensors have rows
_reports: dict[tuple[int, LayoutName], Report | AssertionError] = {}


# One of each kind of message and residual. The others are made of parts that these have: three ranks show most.
EVERYWHERE = {
    "EF21, 1 bit",
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
    "topk",
    "warmup",
}


RECOMMENDED = {"loco", "loco4", "loco1", "topk", "powersgd"}

# Where tensors are cut and sums are formed, or what each rank keeps, which on two and five ranks is as on three.
Part = Literal["cuts", "state"]
PARTS: tuple[Part, ...] = ("cuts", "state")


def _cases(world_size: int, layout: LayoutName, part: Part, preset: str) -> tuple[str, ...]:
    subject = Subject(preset, layout, world_size)
    wanted = part == "cuts"
    return tuple(name for name, case in CASES.items() if case.cut_matters == wanted and case.applies(subject))


def _items() -> Iterator[Any]:
    """Quick: on three ranks `EVERYWHERE` with the first part and `RECOMMENDED` with both; on two ranks all others under
    DDP; on one rank under DDP, and on five under FSDP2, where shards are empty, `RECOMMENDED`.
    """
    for world_size, layout, part in itertools.product(WORLD_SIZES, LAYOUTS, PARTS):
        if part == "state" and world_size not in (1, 3):
            continue
        for preset in sorted(CONFIGURATIONS):
            quick = preset in RECOMMENDED and (world_size, layout) == (1, "ddp")
            quick |= preset in EVERYWHERE and (world_size, part) == (3, "cuts")
            quick |= preset not in EVERYWHERE | RECOMMENDED and (world_size, layout) == (2, "ddp")
            quick |= preset in RECOMMENDED and (world_size == 3 or (world_size, layout) == (5, "fsdp"))
            yield pytest.param(world_size, layout, part, preset, marks=[] if quick else [pytest.mark.slow])


@pytest.fixture
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Failures of every job that the selected tests of this world size and layout ask for."""
    world_size, layout = launch = tuple(request.node.callspec.params[name] for name in ("world_size", "layout"))
    if launch not in _reports:
        wanted: dict[str, tuple[str, ...]] = {}
        for item in request.session.items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            if item.path == request.path and (params["world_size"], params["layout"]) == launch:
                preset = params["preset"]
                wanted[preset] = wanted.get(preset, ()) + _cases(world_size, layout, params["part"], preset)
        jobs = tuple(Job(preset, layout, cases) for preset, cases in wanted.items())
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


@pytest.mark.parametrize(("world_size", "layout", "part", "preset"), list(_items()))
def test_invariants(world_size: int, layout: LayoutName, part: Part, preset: str, report: Report) -> None:
    cases = _cases(world_size, layout, part, preset)
    failures = [f"{case}: {text}" for case in cases for text in report[preset, layout, case]]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
