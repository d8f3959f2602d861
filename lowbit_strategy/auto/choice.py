"""Runs `Auto` on one model: times the framework's own steps and each candidate's, and keeps the fastest.

| phase | steps are | ends |
|---|---|---|
| `own` | the framework's own, timed | after a few |
| `try` | one candidate's, timed | after a few, or after one that is far too slow; then the next, or the decision |
| `empty` | reduced by the engine without compression | when no rank has anything left to send |
| `settled` | the chosen one's | when they take much longer or shorter than they did |

Every change happens after an optimizer step, on all ranks together, and is based on times that they have exchanged: a
step takes as long as on the slowest rank. Ranks exchange times once per phase, and once in `LOOK_EVERY` settled steps.
"""

from __future__ import annotations

import statistics
import weakref
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lowbit_strategy import leaves
from lowbit_strategy.attach.pace import Pace
from lowbit_strategy.attach.prepare import PreparedModel, Wrapper
from lowbit_strategy.auto.auto import Auto
from lowbit_strategy.auto.switching import DDPSwitch, FSDPSwitch
from lowbit_strategy.auto.times import Timed, decide
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.hooks.fsdp import FSDPHook
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.weight_codings import Exact, WeightCode, WeightCoding
from lowbit_strategy.plan.step_times import StepClock

EXTRA_STATE_KEY = "auto"
WARM_STEPS = 3  # the framework's own steps before timing
OWN_STEPS = 8
WARM_TRIED_STEPS = 2  # a candidate's steps before timing; DDP rebuilds its buckets after the first
MOST_TIMED_STEPS = 8  # per candidate
MOST_TRIED_STEPS = 20  # for all candidates, including the one that sends their residuals
TOO_SLOW = 2.0  # a candidate whose first timed step takes this many of the framework's own steps is dropped
LOOK_EVERY = 200  # settled steps between two checks, which ranks make together; the first comes sooner
LOOKED_AT = 50  # the last ones of them are timed
CHANGED = 1.5  # choose again if steps have changed by this factor or its inverse
_MOST_EMPTYING_STEPS = 3
_ROOM = "lowbit_strategy.fitting.fit:room_for"
_KEPT = "lowbit_strategy.fitting.memory:kept_nbytes_of"

Phase = Literal["own", "try", "empty", "settled"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set-up to try.

    Args:
        name: Its name in reports.
        compressor: Compressor of gradients.
        weights: How FSDP2's weights travel; None under DDP.
    """

    name: str
    compressor: Compressor
    weights: WeightCoding | None = None


def candidates(auto: Auto, wrapper: Wrapper, weights: WeightCoding | None) -> list[Candidate]:
    """The candidates, in the order in which they are tried.

    Args:
        auto: The user's `Auto`.
        wrapper: What wraps the model.
        weights: The user's choice; None: none.
    """
    found = [Candidate("loco", _keeping(PRESETS["loco"], auto))]
    if auto.quality == "close":
        found.append(Candidate("loco2", _keeping(PRESETS["loco2"], auto)))
    if wrapper != "fsdp":  # FSDP2 has its own type for reduction, in mp_policy
        found.append(Candidate("bf16", Dense(dtype="bfloat16")))
    if wrapper == "ddp":
        return found
    if weights is not None or wrapper == "hsdp":
        return [replace(each, weights=weights or Exact()) for each in found]
    exact = replace(found[0], name=f"{found[0].name}, exact weights", weights=Exact())
    return [*(replace(each, weights=WeightCode()) for each in found), exact]


def _keeping(compressor: Compressor, auto: Auto) -> Compressor:
    """`compressor` with the user's choices for individual parameters."""
    defaults = {field.name: field.default for field in fields(Compressor)}
    chosen = {name: getattr(auto, name) for name, value in defaults.items() if getattr(auto, name) != value}
    return replace(compressor, **chosen)


def num_timed(num_candidates: int) -> int:
    """Number of timed steps per candidate, so that all together take at most `MOST_TRIED_STEPS`."""
    return min(MOST_TIMED_STEPS, (MOST_TRIED_STEPS - 1) // num_candidates - WARM_TRIED_STEPS)


class AutoChoice(Pace):
    """The choice of one model's set-up on one rank.

    Args:
        prepared: A configuration whose compressor is `Auto`.
        sync: The engine; nothing calls it yet.
        model: The model, which may be wrapped in DDP.
        hook: The hook through which the engine reduces.

    Attributes:
        active: The current candidate; None: the framework's own steps.
        reason: The reason, once it has been decided.
        trial_steps: Steps that the last trial took, including the framework's own.
        trial_s: Extra seconds that it cost, compared with the same number of the framework's own steps.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        sync: GradientSync,
        model: nn.Module,
        hook: DDPHook | FSDPHook,
    ) -> None:
        assert isinstance(prepared.compressor, Auto)
        self.auto = prepared.compressor
        self.sync = sync
        self.switch: DDPSwitch | FSDPSwitch
        if isinstance(hook, FSDPHook):
            self.switch = FSDPSwitch(hook, sync, prepared.weights)
        else:
            assert isinstance(model, DistributedDataParallel)
            self.switch = DDPSwitch(model, sync)
        self.active: Candidate | None = None
        self.reason = ""
        self.trial_steps = 0
        self.trial_s = 0.0
        self.phase: Phase = "own"
        self._room: int | None = None
        if leaves.is_present(_ROOM):
            self._room = leaves.load(_ROOM, "memory")(prepared.options.memory, sync.device, sync.ranks)[0]
        self._all = candidates(self.auto, prepared.wrapper, prepared.options.weights)
        self._clock = StepClock(sync.device)
        self._forward_hook: RemovableHandle | None = None
        self._own: Timed | None = None  # in the current or last trial
        self._waiting: list[Candidate] = []  # candidates still to be tried
        self._tried: list[tuple[Candidate, Timed]] = []
        self._num_timed = 0  # timed steps per candidate
        self._reference_s: float | None = None
        self._patience = LOOK_EVERY
        self._coding: WeightCoding | None = None  # in use while the engine reduces
        self._time_baseline()
        sync.save_with(EXTRA_STATE_KEY, self)

    @property
    def is_baseline(self) -> bool:
        return self.active is None and self.phase != "empty"

    def attached(self, session: Any, model: nn.Module) -> None:
        self._session = weakref.ref(session)
        self._begin_with_forward(model)
        self.switch.give_back()

    def wrapped_by(self, model: DistributedDataParallel) -> None:
        assert isinstance(self.switch, DDPSwitch)
        self._begin_with_forward(model)
        self.switch.rewrapped(model)

    def _begin_with_forward(self, model: nn.Module) -> None:
        """End a step that has not been ended before the next forward pass: the reduction must not change between a
        forward pass, which prepares it, and its backward pass.
        """
        session_of = self._session

        @torch.compiler.disable
        def begin(*_: Any) -> None:
            session = session_of()
            if session is not None and not session.is_closed and torch.is_grad_enabled():
                session.begin_forward()

        self._stop_beginning()
        self._forward_hook = model.register_forward_pre_hook(begin, prepend=True)

    def _stop_beginning(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()

    def close(self) -> bool:
        self._stop_beginning()
        return self.switch.close()

    # -- steps ----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Called when a counted optimizer step has ended on all ranks."""
        if self.is_baseline:
            self.sync.count_step()
        self.trial_steps += self.phase != "settled"
        self._clock.end_step()
        self._remaining -= 1
        if self._remaining == self._timed:
            self._clock.start()
        if self._remaining <= 0:
            {"own": self._try_all, "try": self._next, "empty": self._emptied, "settled": self._look}[self.phase]()

    def _begin(self, num_steps: int, num_timed: int) -> None:
        """Restart the count of steps. The last ones are timed."""
        self._remaining, self._timed = num_steps, num_timed
        if num_steps == num_timed:
            self._clock.start()

    def _slowest(self) -> tuple[float, ...]:
        """The duration of each timed step on the rank where it took longest."""
        everyone = gathered([step.seconds for step in self._clock.take()], self.sync.ranks.everyone.group)
        return tuple(max(step) for step in zip(*everyone, strict=True))

    # -- trying ---------------------------------------------------------------------------------------------------

    def _time_baseline(self) -> None:
        self._begin(WARM_STEPS + OWN_STEPS, OWN_STEPS)

    def _try_all(self) -> None:
        """Begin to try candidates that fit, after the framework's own steps have been timed."""
        self._own, self._tried, self.trial_s = Timed("without compression", self._slowest()), [], 0.0
        fits = zip(*gathered([self._fits(each) for each in self._all], self.sync.ranks.everyone.group), strict=True)
        self._waiting = [each for each, on_ranks in zip(self._all, fits, strict=True) if all(on_ranks)]
        self._num_timed = num_timed(max(1, len(self._waiting)))
        self._try_another()

    def _fits(self, candidate: Candidate) -> bool:
        if self._room is None:
            return True
        compressor = candidate.compressor.phase(self.sync.step_index)
        assignments = assign_all(compressor, list(self.sync.specs.values()))
        nbytes: int = leaves.load(_KEPT, "memory")(self.sync, assignments, candidate.weights)
        return nbytes <= self._room

    def _try_another(self) -> None:
        """Try the next candidate up to its first timed step, or decide."""
        if not self._waiting:
            self._decide()
            return
        candidate = self._waiting.pop(0)
        self.phase = "try"
        self._enter(candidate)
        self._tried.append((candidate, Timed(candidate.name, ())))
        self._begin(WARM_TRIED_STEPS + 1, WARM_TRIED_STEPS + 1)

    def _next(self) -> None:
        """Take more steps with this candidate, unless it is far too slow; or try another one."""
        assert self._own is not None
        candidate, before = self._tried[-1]
        seconds = self._slowest()
        self.trial_s += sum(seconds) - len(seconds) * self._own.median
        warm = 0 if before.seconds else WARM_TRIED_STEPS
        timed = Timed(candidate.name, (*before.seconds, *seconds[warm:]))
        self._tried[-1] = (candidate, timed)
        more = self._num_timed - len(timed.seconds)
        if more <= 0 or timed.median > TOO_SLOW * self._own.median:
            self._try_another()
        else:
            self._begin(more, more)

    def _decide(self) -> None:
        assert self._own is not None
        verdict = decide(self._own, [timed for _, timed in self._tried])
        self.reason = verdict.reason
        if verdict.chosen is not None:
            candidate, timed = self._tried[verdict.chosen]
            if candidate is not self.active:
                self._enter(candidate)
            self._settle(timed.median)
        else:
            self._leave()

    def _enter(self, candidate: Candidate) -> None:
        """Use `candidate` from the next step on, and carry over what was not sent yet."""
        if self.active is None or self.active.weights != candidate.weights:
            self._take(candidate.weights)
        self.sync.use(candidate.compressor)
        self.active = candidate

    def _take(self, weights: WeightCoding | None) -> None:
        self.switch.take(weights)
        self._coding = weights

    # -- stepping aside -------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Use the framework's own steps, once nothing is left to send."""
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
        if any(gathered(self._unsent(), self.sync.ranks.everyone.group)) and self._emptying < _MOST_EMPTYING_STEPS:
            self._begin(1, 1)
            return
        self.phase = "own"
        self.switch.give_back()
        if self._own is None:  # a checkpoint that was written during a trial has been loaded
            self._restart()
        else:
            self._settle_own()

    def _unsent(self) -> bool:
        """Whether any residual waits for gradients that have not arrived."""
        return bool(self.sync.state.carryover.waiting)

    def _settle_own(self) -> None:
        assert self._own is not None
        self._settle(self._own.median)

    def _settle(self, reference_s: float) -> None:
        self.phase = "settled"
        self._reference_s = reference_s
        using = "no compression: the hook is removed" if self.active is None else self.active.name
        self._inform(
            f"{using}, because {self.reason}. Choosing took {self.trial_steps} steps, and"
            f" {max(0.0, self.trial_s):.2g} s more than the same number of the framework's own"
        )
        self._begin(self._patience, min(self._patience, LOOKED_AT))

    # -- looking again --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Check whether steps have become much slower or faster."""
        assert self._reference_s is not None
        seconds = statistics.median_low(self._slowest())
        if not has_changed(seconds, self._reference_s):
            self._begin(LOOK_EVERY, min(LOOK_EVERY, LOOKED_AT))
            return
        self._inform(
            f"a step takes {seconds:.3g} s and took {self._reference_s:.3g} s when this was chosen: looking again"
        )
        self._patience *= 2  # if steps keep changing, check less and less often
        self._own = None
        if self.active is None:
            self._restart()
        else:
            self._leave()

    def _restart(self) -> None:
        self.phase, self.trial_steps, self.trial_s = "own", 0, 0.0
        self._time_baseline()

    def _inform(self, text: str) -> None:
        if self.sync.ranks.logs:
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
        """Continue with the earlier choice; without one the trial starts over."""
        chosen = [each for each in self._all if each.name == state["chosen"]]
        is_same_run = state["settled"] and state["world_size"] == self.sync.ranks.world_size
        if not is_same_run or (state["chosen"] is not None and not chosen):
            return
        self.reason, self._reference_s = state["reason"], state["reference_s"]
        if chosen:
            self._enter(chosen[0])
        self.phase = "settled"
        self._begin(LOOK_EVERY, min(LOOK_EVERY, LOOKED_AT))

    def after_load(self) -> None:
        """After loading residuals from a checkpoint, on all ranks, first send those that nothing else would send."""
        if self.active is None and any(gathered(self._unsent(), self.sync.ranks.everyone.group)):
            self._empty()
            self._take(self._coding)


def has_changed(seconds: float, reference_s: float) -> bool:
    """Whether steps take much more or less time than when the choice was made."""
    return not reference_s / CHANGED < seconds < reference_s * CHANGED
