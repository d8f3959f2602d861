"""The line after 50 steps: a step's time and bytes, and its bytes without compression."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.inform import inform
from lowbit_strategy.methods.weight_codings import Exact
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.messages import step_nbytes
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.running import plans_of
from lowbit_strategy.plan.step_times import StepClock, StepTime
from lowbit_strategy.plan.weight_bytes import weight_transfers

WARM_STEPS, TIMED_STEPS = 40, 10


class StepTimes(StepListener):
    """Times some steps on this rank and reports them once, without sending or allocating anything.

    1. `WARM_STEPS` steps pass
    2. the next `TIMED_STEPS` are timed, and their bytes are counted

    Args:
        sync: The engine, which reduces gradients in every step.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync, self._clock = sync, StepClock(sync.device)
        self._num_steps = self._sent_before = 0
        sync.listeners.add(self, StepPhase.RECORD)

    def wait(self) -> Callable[[], None] | None:
        """Called by the engine."""
        return self._clock.wait()

    def end_step(self, *, counted: bool) -> None:
        """Called by the engine."""
        self._num_steps += 1
        if self._num_steps == WARM_STEPS:
            self._clock.start()
            self._sent_before = self._sync.sent_nbytes
            return
        self._clock.end_step()
        if self._num_steps == WARM_STEPS + TIMED_STEPS:
            sent = (self._sync.sent_nbytes - self._sent_before) // TIMED_STEPS
            weights = self._sync.weights
            sent += 0 if weights is None else weights.step_nbytes
            inform("lowbit_strategy: %s", step_line(median_step(self._clock.take()), sent, plans_of(self._sync)))
            self._sync.listeners.remove(self)


def step_line(step: StepTime, sent_nbytes: int, plans: Sequence[StepPlan]) -> str:
    """The line to report.

    Args:
        step: The median of the timed steps.
        sent_nbytes: Bytes that this rank sent in one of them for gradients and weights.
        plans: The plans of the run, by reducing ranks.
    """
    fp32, bf16 = (sum(uncompressed_nbytes(plan, dtype) for plan in plans) for dtype in (torch.float32, torch.bfloat16))
    what = "gradients" if plans[0].coding in (None, Exact()) else "gradients and weights"
    waited = "" if step.waited_s is None else f", {step.waited_s:.2g} s of it waiting for {what}"
    return (
        f"a step takes {step.seconds:.3g} s{waited} (median of steps {WARM_STEPS + 1} to {WARM_STEPS + TIMED_STEPS} on"
        f" rank 0), and a rank sends {size(sent_nbytes)}; float32 would send {size(fp32)},"
        f" bfloat16 {size(bf16)}"
    )


def uncompressed_nbytes(plan: StepPlan, dtype: torch.dtype) -> int:
    """Bytes that a rank would send to the same peers in a step for gradients and FSDP2's weights, all of `dtype`."""
    modules = {name: replace(module, dtype=dtype) for name, module in plan.modules.items()}
    weights = weight_transfers(Exact(), modules, plan.topology, plan.wrapper)
    return plan.uncompressed_nbytes(dtype.itemsize) + step_nbytes(weights)


def median_step(times: list[StepTime]) -> StepTime:
    """The median of each time."""
    waited = [each.waited_s for each in times if each.waited_s is not None]
    return StepTime(statistics.median(each.seconds for each in times), statistics.median(waited) if waited else None)
