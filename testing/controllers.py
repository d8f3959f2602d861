"""Run a controller: on made-up telemetry, as the driver runs it on measured telemetry, and with the driver itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.checkpoint.capture import Saved, capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control import Controller, Decision, Progress, Telemetry
from lowbit_strategy.methods.dense import Dense
from testing.worlds.single import engine, gradients, reduce_step

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


def check_stop_and_resume(controller: Controller, *, sharded: bool, stop: int, num_steps: int = 12) -> None:
    """On real gradients, with a driver: a run that is saved after `stop` steps goes on as one that never stopped."""

    def run(steps: range, saved: Saved | None = None) -> tuple[list[object], Saved]:
        ticks = iter(range(len(steps) + 1))
        sync = engine(Dense(), sharded=sharded, seed=5)
        driver = AdaptiveDriver(controller, sync, timer=lambda: float(next(ticks)))
        if saved is not None:
            restore(sync, saved, load_rank=lambda _: saved, on_world_size_change="reset")
            sync.listeners.end_step(counted=False)  # the timer's first tick, as the step before would have made
        history: list[object] = []
        for step in steps:
            means = reduce_step(sync, gradients(step, scale=1.0 if step < 6 else 0.2))
            history.append((step, dict(driver.levels), driver.accumulation, {k: v.tolist() for k, v in means.items()}))
        return history, capture(sync)

    whole, _ = run(range(num_steps))
    first, saved = run(range(stop))
    second, _ = run(range(stop, num_steps), saved)
    assert [*first, *second] == whole
