"""The line after the first steps: how long a step takes, and what it sends."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.inform import inform
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.plan.messages import step_nbytes
from lowbit_strategy.plan.plan import Plan
from lowbit_strategy.plan.weights import weight_units
from lowbit_strategy.telemetry.startup_report import size
from lowbit_strategy.telemetry.step_clock import StepTime, clock_of, median_step

WARM_STEPS, TIMED_STEPS = 40, 10


class StepTimes:
    """Times some steps on this rank and reports them once. Nothing is sent or allocated for that.

    1. `WARM_STEPS` steps pass
    2. the next `TIMED_STEPS` are timed, and their bytes are counted

    Args:
        sync: The engine, which reduces gradients in every step.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._num_steps = self._sent_before = 0
        sync.subscribe(self, StepPhase.RECORD)

    def begin_step(self) -> None:
        """Nothing is looked at."""

    def end_step(self, *, counted: bool) -> None:
        """Called by the engine."""
        self._num_steps += 1
        clock, peers = clock_of(self._sync), self._sync.ranks.peers
        if self._num_steps == WARM_STEPS:
            clock.start()
            self._sent_before = peers.sent_nbytes
            return
        clock.end_step()
        if self._num_steps == WARM_STEPS + TIMED_STEPS:
            sent = (peers.sent_nbytes - self._sent_before) // TIMED_STEPS
            weights = self._sync.weights
            sent += 0 if weights is None else weights.step_nbytes
            inform("lowbit_strategy: %s", step_line(median_step(clock.take()), sent, self._sync.plan()))
            self._sync.unsubscribe(self)


def step_line(step: StepTime, sent_nbytes: int, plan: Plan) -> str:
    """What is reported.

    Args:
        step: The median of those that were timed.
        sent_nbytes: By this rank in one of them, gradients and weights.
        plan: Of the run.
    """
    fp32, bf16 = (uncompressed_nbytes(plan, dtype) for dtype in (torch.float32, torch.bfloat16))
    what = "gradients" if plan.coding in (None, Exact()) else "gradients and weights"
    waited = "" if step.waited_s is None else f", {step.waited_s:.2g} s of it waiting for {what}"
    return (
        f"a step takes {step.seconds:.3g} s{waited} (median of steps {WARM_STEPS + 1} to {WARM_STEPS + TIMED_STEPS} on"
        f" rank 0), and a rank sends {size(sent_nbytes)}; float32 would send {size(fp32)}, bfloat16 {size(bf16)}"
    )


def uncompressed_nbytes(plan: Plan, dtype: torch.dtype) -> int:
    """Bytes that a rank would send to the same peers in a step, gradients and FSDP2's weights, all of `dtype`."""
    modules = {name: replace(module, dtype=dtype) for name, module in plan.modules.items()}
    weights = weight_units(Exact(), modules, plan.shape, plan.layout)
    return plan.uncompressed_nbytes(dtype.itemsize) + step_nbytes(weights)
