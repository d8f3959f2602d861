"""Run a controller on made-up telemetry, as the driver runs it on measured telemetry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control import Controller, Decision, Progress, Telemetry

Measure = Callable[[Progress, Decision], Mapping[str, Any]]


def matrices(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, (64, 64)) for name in names]


def nothing(progress: Progress, decision: Decision) -> dict[str, Any]:
    return {}


def run(
    controller: Controller,
    specs: Iterable[TensorSpec],
    progresses: Iterable[Progress],
    *,
    measure: Measure = nothing,
    norms: Callable[[Progress], Mapping[str, float]] | None = None,
    accumulated: Callable[[Progress], Mapping[str, Any]] | None = None,
    restart_at: int | None = None,
) -> list[Decision]:
    """The decision of every step.

    Args:
        controller: Under test.
        specs: The model.
        progresses: One per step.
        measure: What a step with this decision shows to the next one, as `Telemetry` fields.
        norms: Accumulated norms, given whenever the controller reads them.
        accumulated: The same with the other `Telemetry` fields about accumulated gradients; instead of `norms`.
        restart_at: Before this step the state goes through JSON, as through a checkpoint.
    """
    state = controller.init(list(specs), 4)
    shown: Mapping[str, Any] = {}
    decisions = []
    for progress in progresses:
        if progress.step == restart_at:
            state = json.loads(json.dumps(state))
        telemetry = replace(Telemetry(progress=progress), **shown)
        if controller.reads_accumulated(progress, state):
            assert (norms is None) != (accumulated is None)
            if norms is not None:
                telemetry = replace(telemetry, accumulated_norm=norms(progress))
            if accumulated is not None:
                telemetry = replace(telemetry, **accumulated(progress))
        decision = controller.decide(telemetry, state)
        state = decision.state
        shown = measure(progress, decision)
        decisions.append(decision)
    return decisions
