"""What a step would take without compression, reported once the first steps have been timed."""

from __future__ import annotations

import itertools
import logging
import statistics
import time

import torch.distributed as dist

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.inform import inform
from lowbit_strategy.plan.cluster import Cluster
from lowbit_strategy.plan.cost import compute_within, step_time
from lowbit_strategy.plan.plan import Plan
from lowbit_strategy.plan.trial import WORTH_IT
from lowbit_strategy.plan.uncompressed import uncompressed
from lowbit_strategy.telemetry.timing.device_clock import finish
from lowbit_strategy.telemetry.timing.links import measure_cluster
from lowbit_strategy.telemetry.timing.optimizer_clock import OptimizerClock

_log = logging.getLogger("lowbit_strategy")

WARM_STEPS, TIMED_STEPS = 40, 10


class StepForecast:
    """Times some steps of a set-up that stays as it is, measures links once, and reports.

    1. `WARM_STEPS` steps pass; the next `TIMED_STEPS` are timed, each until the device has done its work
    2. the median on the rank where it is longest counts; all ranks measure links, and how fast gradients are coded
    3. the cost model tells what part of the step is not communication, and what a step with it takes uncompressed

    Args:
        sync: The engine, which reduces gradients in every step.
        group: All ranks.
    """

    def __init__(self, sync: GradientSync, group: dist.ProcessGroup | None) -> None:
        self._sync, self._group = sync, group
        self._num_steps = 0
        self._ends: list[float] = []
        self._clock: OptimizerClock | None = None
        self._optimizer_s: list[float] = []
        sync.subscribe(self, StepPhase.RECORD)

    def begin_step(self) -> None:
        """Nothing is looked at."""

    def end_step(self, *, counted: bool) -> None:
        """On all ranks."""
        self._num_steps += 1
        if self._num_steps < WARM_STEPS:
            return
        finish(self._sync.device)
        self._ends.append(time.perf_counter())
        if self._clock is None:
            self._clock = OptimizerClock(self._sync.device)
            return
        self._optimizer_s.append(self._clock.take())
        if len(self._ends) > TIMED_STEPS:
            self._clock = None
            self._sync.unsubscribe(self)
            self._report()

    def _report(self) -> None:
        sync = self._sync
        median = statistics.median(after - before for before, after in itertools.pairwise(self._ends))
        step_s, optimizer_s = max(gathered((median, statistics.median(self._optimizer_s)), self._group))
        began = time.perf_counter()
        cluster = measure_cluster(sync.ranks, sync.compressor, sync.device, self._group)
        if sync.ranks.rank == 0:
            text, pays = forecast(sync.plan(), cluster, step_s, optimizer_s)
            text += f" (measuring took {time.perf_counter() - began:.2g} s)"
            if pays:
                inform("lowbit_strategy: %s", text)
            elif pays is None:
                inform(
                    "lowbit_strategy: %s. It is too close to tell whether compression helps: time a run without", text
                )
            else:
                _log.warning("%s. Compression makes this run no faster on these links: leave it out", text)


def forecast(plan: Plan, cluster: Cluster, step_s: float, optimizer_s: float = 0.0) -> tuple[str, bool | None]:
    """What is reported of a plan whose step takes `step_s` seconds, and whether compression makes it shorter.

    None: by the bounds of the prediction, it may.
    """
    compute_s = compute_within(plan, cluster, step_s, optimizer_s)
    exact, half = (step_time(uncompressed(plan, size, size), cluster, compute_s, optimizer_s) for size in (4, 2))
    link = cluster.inter_node
    text = (
        f"a step takes {step_s:.3g} s, of which communication takes about {step_s - compute_s:.2g} s; without"
        f" compression it would take about {exact.seconds:.3g} s ({exact.low:.3g} to {exact.high:.3g}), in bfloat16"
        f" {half.seconds:.3g} s. Steps {WARM_STEPS + 1} to {WARM_STEPS + TIMED_STEPS} were timed, links measured:"
        f" {link.nbytes_per_s / 1e6:.3g} MB/s in {1e3 * link.latency_s:.3g} ms; the rest is predicted"
    )
    pays = step_s < WORTH_IT * exact.seconds
    return text, None if not pays and step_s < WORTH_IT * exact.high else pays
