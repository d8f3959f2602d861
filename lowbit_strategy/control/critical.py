"""Accordion's question: is a parameter's gradient changing fast? Asked at intervals, of accumulated gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lowbit_strategy.control.base import Accumulate, Progress, State, Telemetry
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration

Unit = Literal["epochs", "steps"]


class Finding(NamedTuple):
    """Which parameters are critical now, None if that was not asked at this step; why; the next state."""

    critical: Mapping[str, bool] | None
    reasons: Mapping[str, str]
    state: State


@configuration
class CriticalRegimes:
    """What both kinds of Accordion share: the norm of the accumulated gradient against that of one interval ago.

    1. The gradient is accumulated over a window: the last `interval` steps, or one whole epoch in `interval`.
    2. When a window closes: ``ratio = |norm_before - norm_now| / norm_before``; critical if ``ratio >= eta``.
    3. Critical as well: the first window, a norm that was zero, and everything from the moment the learning rate falls
       until the next window closes.

    Args:
        eta: Change of the norm that counts as critical. Smaller: light more often.
        interval: Epochs (steps) between two detections; with ``unit="epochs"`` the window is the first epoch of each
            interval, as published, with ``"steps"`` the whole interval.
        unit: What `interval` counts.
        gradient: ``local``: each rank's own, as published, a float32 copy of the whole model on every rank; ``mean``:
            what all ranks agreed on, under FSDP2 a shard's size.
        learning_rate_drop: A fall by more than this share from one step to the next counts as a decay; smooth
            schedules stay below it.
    """

    eta: float = 0.5
    interval: int = 10
    unit: Unit = "epochs"
    gradient: Accumulate = "local"
    learning_rate_drop: float = 0.1

    def __post_init__(self) -> None:
        if not self.eta > 0:
            raise ValueError(f"eta must be positive, got {self.eta!r}: 0.5 asks for a change of half the norm")
        check_positive("interval", self.interval)
        if not 0 < self.learning_rate_drop < 1:
            raise ValueError(f"learning_rate_drop must be between 0 and 1, got {self.learning_rate_drop!r}")

    @staticmethod
    def first_state(specs: Sequence[TensorSpec]) -> State:
        """``regimes`` are for `update`; judged are matrices."""
        return {
            "regimes": {"window": None, "norms": {}, "learning_rate": None},
            "judged": [spec.name for spec in specs if spec.ndim > 1],
        }

    def reads_accumulated(self, progress: Progress, state: State) -> bool:
        return self.closes(progress, state["regimes"])

    def window(self, progress: Progress) -> int | None:
        """Number of the window that a step belongs to; None between windows."""
        if self.unit == "steps":
            return progress.step // self.interval
        return progress.epoch if progress.epoch % self.interval == 0 else None

    def closes(self, progress: Progress, state: State) -> bool:
        return state["window"] is not None and state["window"] != self.window(progress)

    def accumulate(self, progress: Progress) -> Accumulate | None:
        return self.gradient if self.window(progress) is not None else None

    def update(
        self, telemetry: Telemetry, norms: Mapping[str, float], state: State, *, comparable: bool = True
    ) -> Finding:
        """One step.

        Args:
            telemetry: Of the step.
            norms: Of what is asked about, by name; only looked at when a window closes.
            state: What the step before has left.
            comparable: Whether the window that closes is of the same kind as the one before. If not it only becomes
                what the next one is compared with.
        """
        progress = telemetry.progress
        critical: dict[str, bool] | None = None
        reasons: dict[str, str] = {}
        following = dict(state, window=self.window(progress), learning_rate=progress.learning_rate)
        if self.closes(progress, state):
            if comparable or not state["norms"]:
                critical = {}
                for name, norm in norms.items():
                    critical[name], reasons[name] = self._judge(state["norms"].get(name), norm)
            following["norms"] = dict(norms)
        if self._fell(state["learning_rate"], progress.learning_rate):
            reason = f"the learning rate fell from {state['learning_rate']:.3g} to {progress.learning_rate:.3g}"
            critical = dict.fromkeys(norms, True)
            reasons = dict.fromkeys(norms, reason)
        return Finding(critical, reasons, following)

    def _judge(self, before: float | None, now: float) -> tuple[bool, str]:
        if before is None:
            return True, "first window"
        if before == 0 or not math.isfinite(before) or not math.isfinite(now):
            return True, f"no ratio (gradient norm {before:.3g}, then {now:.3g})"
        ratio = abs(before - now) / before
        extent = "at least" if ratio >= self.eta else "less than"
        return ratio >= self.eta, f"gradient norm changed by {extent} {self.eta:g} ({ratio:.2f})"

    def _fell(self, before: float | None, now: float | None) -> bool:
        return before is not None and now is not None and now < (1 - self.learning_rate_drop) * before
