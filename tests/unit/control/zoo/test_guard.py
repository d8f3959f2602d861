"""Guard: warnings, fallback and recovery."""

from __future__ import annotations

import math

import pytest

from lowbit_strategy.control import (
    Bounds,
    Decision,
    EndToEnd,
    Energy,
    Guard,
    Phase,
    Progress,
    Schedule,
    Static,
    group_of,
)
from lowbit_strategy.control.bounds import Reading
from lowbit_strategy.methods.loco import LoCo
from testing.controllers import matrices, run

TWO, FOUR, EIGHT = LoCo(bits=2), LoCo(bits=4), LoCo(bits=8)


def progresses(count: int) -> list[Progress]:
    return [Progress(step=step) for step in range(count)]


def bad_between(first: int, last: int, *, residual: float = 0.0) -> object:
    """Group ``x`` has a relative error of 0.9 in these steps, 0.3 otherwise; group ``y`` is always fine."""

    def measure(progress: Progress, decision: Decision) -> dict[str, object]:
        error = {"x.0": 0.81 if first <= progress.step < last else 0.09, "y": 0.09}
        energy = {level: {name: Energy(1.0, 1.0, error[name]) for name in error} for level in decision.probe.levels}
        return {"energy": energy, "residual_norm": dict.fromkeys(error, residual)}

    return measure


def test_falls_back_after_patience_and_returns_after_patience() -> None:
    guard = Guard(inner=Static(TWO), bounds=Bounds(max_error=0.5, patience=3), fallback=EIGHT, observe_every=10)
    decisions = run(guard, matrices("x.0", "y"), progresses(200), measure=bad_between(50, 100))
    # Observed at 50, 60, 70: falls back at the step after the third; good again at 100, 110, 120.
    held = [step for step, decision in enumerate(decisions) if decision.levels["x.0"] == 1]
    assert held == list(range(71, 121))
    assert all(decision.levels["y"] == 0 for decision in decisions)
    assert [step for step, decision in enumerate(decisions) if decision.probe.levels] == list(range(0, 200, 10))
    switches = {step: decision.switches for step, decision in enumerate(decisions) if decision.switches}
    assert [(step, switch.what, switch.before, switch.after) for step in switches for switch in switches[step]] == [
        (71, "x.0", "loco(bits=2)", "loco(bits=8)"),
        (121, "x.0", "loco(bits=8)", "loco(bits=2)"),
    ]
    assert "relative error 0.9 > 0.5" in switches[71][0].reason
    assert "relative error 0.9 > 0.5 3 times in a row" in decisions[71].warnings[0]
    assert decisions[121].warnings == ("x.*: within its bounds again",)


def test_only_warns_without_a_fallback() -> None:
    guard = Guard(inner=Static(TWO), bounds=Bounds(max_error=0.5, patience=2), observe_every=10)
    decisions = run(guard, matrices("x.0", "y"), progresses(100), measure=bad_between(50, 100))
    assert all(decision.levels == {"x.0": 0, "y": 0} for decision in decisions)
    assert [step for step, decision in enumerate(decisions) if decision.warnings] == [61]


def test_residual_bound() -> None:
    guard = Guard(inner=Static(TWO), bounds=Bounds(max_residual=2.0, patience=1), fallback=EIGHT, observe_every=10)
    decisions = run(guard, matrices("x.0", "y"), progresses(20), measure=bad_between(0, 0, residual=3.0))
    assert decisions[1].levels == {"x.0": 1, "y": 1}
    assert "residual 3 > 2" in decisions[1].warnings[0]


def test_inner_decisions_go_on_underneath() -> None:
    inner = Schedule([Phase(compressor=TWO), Phase(compressor=FOUR, start=80)])
    guard = Guard(inner=inner, bounds=Bounds(max_error=0.5, patience=1), fallback=EIGHT, observe_every=10)
    decisions = run(guard, matrices("x.0", "y"), progresses(120), measure=bad_between(50, 100))
    assert decisions[60].levels == {"x.0": 2, "y": 0}
    assert decisions[85].levels == {"x.0": 2, "y": 1}
    assert decisions[105].levels == {"x.0": 1, "y": 1}


def test_not_a_number_is_out_of_bounds() -> None:
    verdict = Bounds(max_error=0.5, patience=1).update({"a": Reading(math.nan, 0.0)}, Bounds(max_error=1).init())
    assert "a" in verdict.raised


@pytest.mark.parametrize("restart_at", [65, 95])
def test_a_restart_changes_nothing(restart_at: int) -> None:
    guard = Guard(inner=Static(TWO), bounds=Bounds(max_error=0.5), fallback=EIGHT, observe_every=10)
    arguments = (guard, matrices("x.0", "y"), progresses(200))
    measure = bad_between(50, 100)
    assert run(*arguments, measure=measure, restart_at=restart_at) == run(*arguments, measure=measure)


def test_bad_guards() -> None:
    bounds = Bounds(max_error=0.5)
    with pytest.raises(ValueError, match="not lighter than"):
        Guard(inner=Static(FOUR), bounds=bounds, fallback=TWO)
    with pytest.raises(ValueError, match="observe_every"):
        Guard(inner=Static(FOUR), bounds=bounds, observe_every=0)
    with pytest.raises(ValueError, match="guards nothing"):
        Bounds()
    with pytest.raises(ValueError, match="patience"):
        Bounds(max_error=0.5, patience=0)
    with pytest.raises(ValueError, match="max_error must be positive"):
        Bounds(max_error=0.0)


@pytest.mark.parametrize(
    ("by", "group"),
    [("kind", "gpt.blocks.*.mlp2.weight"), ("module", "gpt.blocks.3.mlp2"), ("parameter", "gpt.blocks.3.mlp2.weight")],
)
def test_groups(by: str, group: str) -> None:
    assert group_of("gpt.blocks.3.mlp2.weight", by) == group
    assert group_of("0.weight") == "*.weight"
    assert group_of("gpt.blocks.3", len) == 12


def test_falls_back_for_the_error_of_the_whole_reduction_and_stays() -> None:
    """The uplink alone looks fine: what is lost on the downlink shows in the result only."""

    def measure(progress: Progress, decision: Decision) -> dict[str, object]:
        energy = {level: {"x.0": Energy(1.0, 1.0, 0.01)} for level in decision.probe.levels}
        error = 0.64 if decision.levels["x.0"] == 0 else 0.01
        both = {"x.0": EndToEnd(error, 1.0)} if decision.probe.end_to_end else {}
        return {"energy": energy, "end_to_end": both}

    bounds = Bounds(max_error=0.5, max_end_to_end=0.5, patience=2)
    guard = Guard(inner=Static(TWO), bounds=bounds, fallback=EIGHT, observe_every=10)
    decisions = run(guard, matrices("x.0"), progresses(100), measure=measure)
    assert [step for step, decision in enumerate(decisions) if decision.levels["x.0"] == 1] == list(range(11, 100))
    assert "end-to-end error 0.8 > 0.5" in decisions[11].switches[0].reason
    assert [step for step, decision in enumerate(decisions) if decision.probe.end_to_end] == list(range(0, 100, 10))
