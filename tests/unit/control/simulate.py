"""Run a controller on made-up telemetry, as the driver runs it on measured telemetry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lowbit_strategy.control import Clock, Controller, Decision, Telemetry
from lowbit_strategy.methods._base.tensor_spec import TensorSpec

Measure = Callable[[Clock, Decision], Mapping[str, Any]]


def matrices(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, (64, 64)) for name in names]


def nothing(clock: Clock, decision: Decision) -> dict[str, Any]:
    return {}


def run(
    controller: Controller,
    specs: Iterable[TensorSpec],
    clocks: Iterable[Clock],
    *,
    measure: Measure = nothing,
    norms: Callable[[Clock], Mapping[str, float]] | None = None,
    restart_at: int | None = None,
) -> list[Decision]:
    """The decision of every step.

    Args:
        controller: Under test.
        specs: The model.
        clocks: One a step.
        measure: What a step with this decision shows to the next one, as `Telemetry` fields.
        norms: Accumulated norms, given whenever the controller reads them.
        restart_at: Before this step the state goes through JSON, as through a checkpoint.
    """
    state = controller.init(list(specs), 4)
    shown: Mapping[str, Any] = {}
    decisions = []
    for clock in clocks:
        if clock.step == restart_at:
            state = json.loads(json.dumps(state))
        telemetry = replace(Telemetry(clock=clock), **shown)
        if controller.reads_accumulated(clock, state):
            assert norms is not None
            telemetry = replace(telemetry, accumulated_norm=norms(clock))
        decision = controller.decide(telemetry, state)
        state = decision.state
        shown = measure(clock, decision)
        decisions.append(decision)
    return decisions
