"""Runs a controller on one engine: takes the requested measurements, sums them over ranks, and applies decisions."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor

from lowbit_strategy import leaves
from lowbit_strategy.adaptation.rehearsal import rehearse
from lowbit_strategy.adaptation.window_sums import WindowSums
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.control.base import (
    Controller,
    Decision,
    Probe,
    Progress,
    State,
    Switch,
    Telemetry,
    labels,
)
from lowbit_strategy.engine.bucket import Bucket, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.inform import inform
from lowbit_strategy.telemetry.metric_names import metric_name

EXTRA_STATE_KEY = "adaptive"
_FIGURES = "lowbit_strategy.adaptation.zoo.step_figures:StepFigures"

_log = logging.getLogger("lowbit_strategy")


class Event(NamedTuple):
    """A switch and its step."""

    step: int
    epoch: int | None
    switch: Switch


class AdaptiveDriver(BucketObserver, StepListener):
    """Runs a controller. When a step begins, on every rank:

    1. the measurements of the last step, summed over ranks, are given to the controller
    2. its decision is applied: parameters whose level changes are regrouped, and residuals are carried over
    3. the measurements that its probe requests are taken in this step

    Args:
        controller: The controller.
        sync: The engine, into which no checkpoint has been loaded yet.
        clock: Returns the progress for a number of completed steps, the same on all ranks. By default only steps are
            counted.
        timer: Returns the time in seconds, for step times.

    Attributes:
        events: Switches since the caller last cleared the list.
        warnings: Warnings since the caller last cleared the list.
        accumulation: Batches per optimizer step, if the controller sets it; the framework's adapter applies it.
        learning_rate_factor: Factor on the scheduler's learning rate, also applied by the adapter.

    Raises:
        ValueError: The controller does not support this model.
    """

    def __init__(
        self,
        controller: Controller,
        sync: GradientSync,
        clock: Callable[[int], Progress] | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        _check_supported(controller, sync)
        self.controller, self.sync = controller, sync
        self.clock = clock or (lambda step: Progress(step=step))
        self.timer = timer
        self.labels = labels(controller.levels)
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.accumulation = controller.initial_accumulation
        self.learning_rate_factor = 1.0
        self.levels: Mapping[str, int] = {}
        self.state = self._initial_state()
        self._decided_step: int | None = None
        self._probe = Probe()
        sync.listeners.add(self, StepPhase.DECIDE)
        self._window = WindowSums(sync)
        self._figures: Any = None
        if leaves.is_present(_FIGURES):
            self._figures = leaves.load(_FIGURES, _FIGURES)(sync, controller, lambda: self.timer())
        sync.save_with(EXTRA_STATE_KEY, self)
        if sync.device.type == "cuda":  # compile kernels
            sizes = dict.fromkeys(ranks.peers.world_size for ranks in sync.all_ranks)
            for level, size in itertools.product(controller.levels, sizes):
                rehearse(level.phase(sync.step_index), world_size=size, sharded=sync.sharded, device=sync.device)

    def _initial_state(self) -> State:
        self._names = tuple(self.sync.specs)
        specs = list(self.sync.state.full_specs.values())
        levels = self.controller.levels
        for level in levels:
            level.check(specs)
        if levels:  # decisions do not affect parameters that every level exempts
            specs = self._concerned(specs)
        return self.controller.init(specs, self.sync.ranks.peers.world_size)

    def _concerned(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Parameters that some level compresses on any rank. Sizes of parts may differ along other mesh dims, and all
        ranks must decide the same.
        """
        levels = self.controller.levels
        names = {spec.name for spec in specs if any(level.assign(spec).kind != "exempt" for level in levels)}
        if self.sync.in_parts:
            names.update(*gathered(names, self.sync.ranks.everyone.group))
        return [spec for spec in specs if spec.name in names]

    # -- the step -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the controller when training begins. In rounds it first decides when the first round ends.

        Raises:
            ValueError: The controller lacks information, such as the epoch.
        """
        if self._decided_step is None:
            progress = self.clock(self.sync.step_index)
            names = self.sync.specs if self.controller.reads_accumulated(progress, self.state) else ()
            telemetry = Telemetry(progress=progress, accumulated_norm=dict.fromkeys(names, 0.0))
            self.controller.decide(telemetry, self.state)

    def begin_step(self) -> AdaptiveDriver | None:
        sync = self.sync
        if self._decided_step != sync.step_index:  # a step that overflowed is repeated: its decision stands
            progress = self.clock(sync.step_index)
            shown = {} if self._figures is None else self._figures.read()
            if self._names != tuple(sync.specs):  # parameters have been unfrozen
                self.state = _extended(self._initial_state(), self.state)
            if self.controller.reads_accumulated(progress, self.state):
                shown |= self._window.read()
            self._apply(self.controller.decide(Telemetry(progress=progress, **shown), self.state), progress)
        return self if self._probe.accumulate else None

    def _apply(self, decision: Decision, progress: Progress) -> None:
        self.state = decision.state
        self._decided_step = progress.step
        if decision.levels and decision.levels != self.levels:
            self.levels = dict(decision.levels)
            self._choose_levels()
        self.accumulation = decision.accumulation
        self.learning_rate_factor = decision.learning_rate_factor
        if self.sync.rounds is not None:
            self.sync.rounds.every = decision.every
        self._ask(decision.probe)
        self.events += [Event(progress.step, progress.epoch, switch) for switch in decision.switches]
        self.warnings += decision.warnings
        if self.sync.ranks.logs:
            for switch in decision.switches:
                inform("step %d: %s: %s -> %s (%s)", progress.step, *switch)
            for warning in decision.warnings:
                _log.warning("step %d: %s", progress.step, warning)

    def _ask(self, probe: Probe) -> None:
        """Take these measurements in the step that begins."""
        self._probe = probe
        if probe.accumulate is not None:
            self._window.accumulate(probe.accumulate)
        if self._figures is not None:
            self._figures.ask(probe)
        elif probe.levels or probe.end_to_end or probe.seconds:
            leaves.load(_FIGURES, type(self.controller).__name__)

    def _choose_levels(self) -> None:
        """Apply the levels. Parameters on which the controller does not decide get the first level."""
        chosen = {name: self.controller.levels[self.levels.get(name, 0)] for name in self.sync.specs}
        self.sync.use(self.sync.compressor, chosen)

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        probe = self._probe
        views = [param.within(x, out) for param in bucket.params]
        if probe.accumulate == "local":
            self._add(views)
        yield from stages
        if probe.accumulate == "mean":
            self._add(views)

    def _add(self, views: Sequence[ParamView]) -> None:
        for view in views:
            self._window.add(view, square=self._probe.square)

    def end_step(self, *, counted: bool) -> None:
        if counted and self._probe.accumulate is not None:
            self._window.count_step()

    # -- saving -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "labels": list(self.labels),
            "controller": type(self.controller).__name__,
            "state": self.state,
            "decided_step": self._decided_step,
            "probe": asdict(self._probe),
            "levels": dict(self.levels),
            "accumulation": self.accumulation,
            "learning_rate_factor": self.learning_rate_factor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["labels"] != list(self.labels) or state["controller"] != type(self.controller).__name__:
            if self.sync.ranks.logs:
                _log.warning(
                    "the checkpoint was written with a different controller (%s of %s): this one starts over",
                    state["controller"],
                    ", ".join(state["labels"]),
                )
            self._window.forget()
            if self._figures is not None:
                self._figures.forget()
            return
        self.state, self._decided_step = state["state"], state["decided_step"]
        self._ask(Probe(**state["probe"]))
        self.accumulation, self.learning_rate_factor = state["accumulation"], state["learning_rate_factor"]
        self.levels = dict(state["levels"])
        if self.levels:
            self._choose_levels()


def _check_supported(controller: Controller, sync: GradientSync) -> None:
    """Raise a ValueError if `controller` does not support how `sync` synchronizes."""
    if sync.ranks.comes_and_goes:
        raise ValueError(
            f"{type(controller).__name__} does not support replicas that join and leave: a new one would not"
            " know earlier decisions. Leave the controller out"
        )
    if controller.initial_accumulation is not None and sync.has_rounds:
        raise ValueError(
            f"{type(controller).__name__} does not support rounds of several steps: it judges gradients and"
            " sets a step's number of batches, and in rounds only weights travel. Synchronize in every step, or use"
            " a controller that does not change the batch, such as Accordion"
        )


def _extended(fresh: Any, old: Any) -> Any:
    """A controller's state after parameters were unfrozen: the old state, plus the new parameters' from `fresh`."""
    if isinstance(fresh, dict) and isinstance(old, dict):
        return {key: _extended(fresh.get(key, old.get(key)), old.get(key, fresh.get(key))) for key in {**fresh, **old}}
    is_names = isinstance(fresh, list) and bool(fresh) and isinstance(fresh[0], str)
    return fresh if is_names else old


def level_metrics(driver: AdaptiveDriver) -> dict[str, float]:
    """Metrics: the fraction of all elements at each of a controller's levels."""
    return {metric_name("share", f"level_{at}"): share for at, share in enumerate(shares(driver).values())}


def shares(driver: AdaptiveDriver) -> dict[str, float]:
    """The fraction of all elements at each level, by label, for the controller's current levels."""
    specs, numels = driver.sync.specs, dict.fromkeys(driver.labels, 0)
    for name, level in driver.levels.items():
        numels[driver.labels[level]] += specs[name].numel
    total = sum(numels.values()) or 1
    return {label: numel / total for label, numel in numels.items()}
