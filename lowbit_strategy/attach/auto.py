"""`Auto` at work on one model: times the framework's own steps, tries candidates, keeps the fastest or steps aside.

| phase | steps are | ends |
|---|---|---|
| `own` | the framework's own, timed | after a few; links are measured then, and candidates predicted |
| `try` | one candidate's, timed | after a few; then the next, or more of the same, or the decision |
| `empty` | reduced by the engine without compression | when no rank has anything left to send |
| `settled` | the chosen one's | when they take a third more or less than they did |

Every change comes after an optimizer's step, on all ranks together, and from figures that all of them have.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Literal

import torch.distributed as dist

from lowbit_strategy.attach.fit import room_for
from lowbit_strategy.attach.prepare import Prepared
from lowbit_strategy.attach.wiring import Wiring
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.methods.auto import Auto
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.plan.cost import compute_within, step_time
from lowbit_strategy.plan.plan import Plan
from lowbit_strategy.plan.trial import (
    OWN_STEPS,
    WARM_STEPS,
    Candidate,
    Timed,
    Trial,
    candidates,
    decide,
    has_changed,
    hopeful,
)
from lowbit_strategy.plan.uncompressed import uncompressed
from lowbit_strategy.telemetry.timing.device_clock import finish
from lowbit_strategy.telemetry.timing.links import measure_cluster
from lowbit_strategy.telemetry.timing.optimizer_clock import OptimizerClock

EXTRA_STATE_KEY = "auto"
LOOK_EVERY = 200  # settled steps between two looks, which the ranks take together; the first comes sooner
_MOST_EMPTYING_STEPS = 3

Phase = Literal["own", "try", "empty", "settled"]


class AutoChoice:
    """The choice of one model's set-up on one rank.

    Args:
        prepared: With `Auto` as its compressor.
        sync: The engine; nothing calls it yet.
        wiring: Switches between the framework's own communication and the engine's.
        group: All ranks.

    Attributes:
        active: What is in force; None: the framework's own.
        reason: Why it is, once it has been decided.
        trial_steps: Steps that the last trial took, the framework's own among them.
        trial_s: What it cost beyond as many of the framework's own steps, links included.
    """

    def __init__(self, prepared: Prepared, sync: GradientSync, wiring: Wiring, group: dist.ProcessGroup | None) -> None:
        assert isinstance(prepared.compressor, Auto)
        self.auto = prepared.compressor
        self.sync = sync
        self.wiring = wiring
        self.active: Candidate | None = None
        self.reason = ""
        self.trial_steps = 0
        self.trial_s = 0.0
        self.phase: Phase = "own"
        self._group = group
        self._room = room_for(prepared.options.memory, sync.device, sync.ranks)[0]
        self._all = candidates(self.auto, prepared.layout, prepared.options.weights)
        self._trial: Trial | None = None
        self._reference_s: float | None = None
        self._next_look = 0
        self._patience = LOOK_EVERY
        self._coding: WeightCoding | None = None  # in force while the engine reduces
        self._seconds: list[float] = []
        self._optimizer_s: list[float] = []
        self._clock: OptimizerClock | None = None  # in the phase "own"
        self._last: float | None = None
        self._begin_own()
        sync.save_with(EXTRA_STATE_KEY, self)

    @property
    def is_own(self) -> bool:
        """Whether steps are the framework's own, which the engine knows nothing of."""
        return self.active is None and self.phase != "empty"

    # -- steps ----------------------------------------------------------------------------------------------------

    def end_step(self) -> bool:
        """An optimizer step that counts is over, on all ranks. Returns True."""
        if self.is_own:
            self.sync.count_local_step()
        if self.phase != "settled":
            finish(self.sync.device)
            self.trial_steps += 1
        now = time.perf_counter()
        if self._clock is not None:
            self._optimizer_s.append(self._clock.take())
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        self._remaining -= 1
        if self._remaining <= 0:
            {"own": self._plan, "try": self._next, "empty": self._emptied, "settled": self._look}[self.phase]()
        return True

    def _begin(self, num_steps: int, num_timed: int) -> None:
        """Count steps anew, of which the last ones are timed."""
        self._remaining, self._timed = num_steps, num_timed
        self._seconds = []
        self._last = None if num_steps == num_timed else time.perf_counter()

    def _measured(self) -> tuple[float, ...]:
        return tuple(self._seconds[-self._timed :])

    def _slowest(self) -> tuple[float, ...]:
        """Each timed step as long as it was on the rank where it took longest."""
        everyone = gathered(self._measured(), self._group)
        return tuple(max(step) for step in zip(*everyone, strict=True))

    # -- the framework's own --------------------------------------------------------------------------------------

    def _begin_own(self) -> None:
        self._clock, self._optimizer_s = OptimizerClock(self.sync.device), []
        self._begin(WARM_STEPS + OWN_STEPS, OWN_STEPS)

    def _plan(self) -> None:
        """The framework's own steps have been timed: measure links, predict, begin to try."""
        own, self._clock = Timed("without compression", self._slowest()), None
        optimizer_s = max(gathered(statistics.median(self._optimizer_s[-OWN_STEPS:]), self._group))
        began = time.perf_counter()
        device = self.sync.device
        cluster = measure_cluster(self.sync.ranks, self._all[0].compressor, device, self._group)
        plans = [self._plan_of(each) for each in self._all]
        plain = uncompressed(self._plan_of(Candidate("", self.auto, Exact())), 4)
        compute_s = compute_within(plain, cluster, own.median, optimizer_s)
        seconds = [step_time(plan, cluster, compute_s, optimizer_s).seconds for plan in plans]
        fits = [self._room is None or plan.memory.total <= self._room for plan in plans]
        costs = [each.steps * predicted for each, predicted in zip(self._all, seconds, strict=True)]
        promising = [at for at in hopeful(costs, own.median) if fits[at]]
        self._trial = Trial(own, [(self._all[at], costs[at]) for at in promising])
        self.trial_s = time.perf_counter() - began
        link = cluster.inter_node
        predictions = ", ".join(f"{each.name} {s:.3g} s" for each, s in zip(self._all, seconds, strict=True))
        self._inform(
            f"a step without compression takes {own.median:.3g} s, of which about {compute_s:.3g} s is not"
            f" communication and {optimizer_s:.3g} s is the optimizer; ranks reach each other at"
            f" {link.nbytes_per_s / 1e6:.3g} MB/s in {1e3 * link.latency_s:.3g} ms, measured. Predicted: {predictions}"
        )
        self._next()

    def _plan_of(self, candidate: Candidate) -> Plan:
        compressor = candidate.compressor.phase(self.sync.step_index)
        assignments = assign_all(compressor, list(self.sync.specs.values()))
        return self.sync.plan(assignments, candidate.weights)

    # -- trying ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """The next candidate, or more steps of this one, or the decision."""
        trial = self._trial
        assert trial is not None
        if self.phase == "try":
            assert self.active is not None
            trial.record(self.active, self._slowest())
        self.phase = "try"
        if (coming := trial.next()) is not None:
            candidate, steps, timed = coming
            if candidate is not self.active:
                self._enter(candidate)
            self._begin(steps, timed)
            return
        verdict = decide(trial.own, trial.times)
        self.reason, self.trial_s = verdict.reason, self.trial_s + trial.more_s
        if verdict.chosen is not None:
            self._enter(trial.tried[verdict.chosen])
            self._settle(trial.times[verdict.chosen].median)
        else:
            self._leave()

    def _enter(self, candidate: Candidate) -> None:
        """`candidate` from the next step on; what was not sent yet goes along."""
        if self.active is None or self.active.weights != candidate.weights:
            self._take(candidate.weights)
        self.sync.use(candidate.compressor)
        self.active = candidate

    def _take(self, weights: WeightCoding | None) -> None:
        self.wiring.take(weights)
        self._coding = weights

    # -- stepping aside -------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The framework's own, once nothing is left to send."""
        if self.active is None:
            self._settle_own()
            return
        self.active = None
        self._empty()

    def _empty(self) -> None:
        self.phase = "empty"
        self.sync.use(self.auto)
        self._emptying = 0
        self._begin(1, 1)

    def _emptied(self) -> None:
        self._emptying += 1
        if any(gathered(self._unsent(), self._group)) and self._emptying < _MOST_EMPTYING_STEPS:
            self._begin(1, 1)
            return
        self.phase = "own"
        self.wiring.give_back()
        if self._trial is None:  # a checkpoint has been loaded that was written while something was tried
            self._restart()
        else:
            self._settle_own()

    def _unsent(self) -> bool:
        """Whether anything waits for gradients that have not come."""
        return any(name in self.sync.state.carryover for name in self.sync.specs)

    def _settle_own(self) -> None:
        assert self._trial is not None
        self._settle(self._trial.own.median)

    def _settle(self, reference_s: float) -> None:
        self.phase = "settled"
        self._reference_s = reference_s
        using = "no compression: the hook is removed" if self.active is None else self.active.name
        self._inform(
            f"{using}, because {self.reason}. Choosing took {self.trial_steps} steps, and {self.trial_s:.2g} s more"
            " than as many of the framework's own"
        )
        self._begin(self._patience, min(self._patience, 50))

    # -- looking again --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Have steps become a third slower or faster?"""
        assert self._reference_s is not None
        seconds = max(gathered(statistics.median(self._measured()), self._group))
        if not has_changed(seconds, self._reference_s):
            self._begin(LOOK_EVERY, 50)
            return
        self._inform(
            f"a step takes {seconds:.3g} s and took {self._reference_s:.3g} s when this was chosen: looking again"
        )
        self._patience *= 2  # what keeps changing is looked at less and less
        self._trial = None
        if self.active is None:
            self._restart()
        else:
            self._leave()

    def _restart(self) -> None:
        self.phase, self.trial_steps, self.trial_s = "own", 0, 0.0
        self._begin_own()

    def _inform(self, text: str) -> None:
        if self.sync.ranks.rank == 0:
            inform("lowbit_strategy: auto: %s", text)

    # -- saving ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "settled": self.phase == "settled",
            "chosen": None if self.active is None else self.active.name,
            "reference_s": self._reference_s,
            "reason": self.reason,
            "world_size": self.sync.ranks.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What had been chosen goes on; otherwise the trial begins anew."""
        chosen = [each for each in self._all if each.name == state["chosen"]]
        goes_on = state["settled"] and state["world_size"] == self.sync.ranks.world_size
        if not goes_on or (state["chosen"] is not None and not chosen):
            return
        self.reason, self._reference_s = state["reason"], state["reference_s"]
        if chosen:
            self._enter(chosen[0])
        self.phase, self._clock = "settled", None
        self._begin(LOOK_EVERY, 50)

    def after_load(self) -> None:
        """A checkpoint's residuals have been loaded; on all ranks. What nothing would send is sent first."""
        if self.active is None and any(gathered(self._unsent(), self._group)):
            self._empty()
            self._take(self._coding)
