"""The launches that `testing.processes.scenarios` shares between the tests of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.processes.ranks import run_ranks
from testing.processes.scenarios import Facts, Scenario, run_scenarios

LAUNCH_TIMEOUT_S = 280
_Outcomes = list[dict[str, Facts | str]] | AssertionError
_launches: dict[tuple[Path, int], _Outcomes] = {}


def _launch(request: pytest.FixtureRequest, folder: Path, world_size: int) -> _Outcomes:
    chosen: dict[str, Scenario] = {}
    for item in request.session.items:
        scenario = getattr(getattr(item, "callspec", None), "params", {}).get("facts")
        if item.path == request.path and isinstance(scenario, Scenario) and scenario.world_size == world_size:
            chosen[scenario.name] = scenario
    try:
        return run_ranks(
            run_scenarios,
            world_size,
            tuple(chosen.values()),
            folder,
            timeout=LAUNCH_TIMEOUT_S,
            process_group=None,
        )
    except AssertionError as error:  # a failed launch is reported by each of its tests, and not tried again
        return error


@pytest.fixture
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What the test's scenario returned on every rank."""
    scenario: Scenario = request.param
    key = (request.path, scenario.world_size)
    if key not in _launches:
        _launches[key] = _launch(request, tmp_path_factory.mktemp("scenarios"), scenario.world_size)
    outcomes = _launches[key]
    if isinstance(outcomes, AssertionError):
        pytest.fail(f"the launch failed:\n{str(outcomes)[:6000]}", pytrace=False)
    found = [outcome[scenario.name] for outcome in outcomes]
    errors = [f"--- rank {rank} raised ---\n{text}" for rank, text in enumerate(found) if isinstance(text, str)]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    return [value for value in found if not isinstance(value, str)]
