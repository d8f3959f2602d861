"""Accordion: light compression in critical regimes, in which gradient norms change fast; otherwise heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import (
    Accumulate,
    Controller,
    Decision,
    Probe,
    Progress,
    State,
    Telemetry,
    check_order,
)
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration

MODEL = "model"  # the name under which the whole model is judged
WindowUnit = Literal["epochs", "steps"]


@configuration
class CriticalRegimes:
    """Detects critical regimes by comparing the norm of the accumulated gradient with that of one interval ago.

    See the steps of `Accordion`. A window is the last `interval` steps, or one whole epoch of every `interval` epochs.

    Args:
        eta: Relative change of the norm that counts as critical. Smaller: light compression more often.
        interval: Epochs (steps) between two detections. With ``unit="epochs"`` the window is the first epoch of each
            interval, as published. With ``"steps"`` it is the whole interval.
        unit: What `interval` counts.
        gradient: ``local``: each rank's own, as published; needs a float32 copy of the model on every rank. ``mean``:
            the mean over ranks; under FSDP2 only a shard is kept.
        learning_rate_drop: A relative drop of more than this in one step counts as a decay. Smooth schedules drop less.
    """

    eta: float = 0.5
    interval: int = 10
    unit: WindowUnit = "epochs"
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
        """The first state: ``regimes`` is the state of `update`; ``judged`` holds the names of matrices."""
        return {
            "regimes": {"window": None, "norms": {}, "learning_rate": None},
            "judged": [spec.name for spec in specs if spec.ndim > 1],
        }

    def reads_accumulated(self, progress: Progress, state: State) -> bool:
        return self.closes(progress, state["regimes"])

    def window(self, progress: Progress) -> int | None:
        """The number of a step's window; None between windows."""
        if self.unit == "steps":
            return progress.step // self.interval
        epoch = progress.known_epoch
        return epoch if epoch % self.interval == 0 else None

    def closes(self, progress: Progress, state: State) -> bool:
        return state["window"] is not None and state["window"] != self.window(progress)

    def accumulate(self, progress: Progress) -> Accumulate | None:
        return self.gradient if self.window(progress) is not None else None

    def update(
        self, telemetry: Telemetry, norms: Mapping[str, float], state: State
    ) -> tuple[dict[str, tuple[bool, str]] | None, State]:
        """Process one step.

        Args:
            telemetry: Telemetry of the step.
            norms: Gradient norms by name, used only when a window closes.
            state: The state that the previous step returned.

        Returns:
            For each of `norms` whether it is critical and why, or None if nothing was judged; and the next state.
        """
        progress = telemetry.progress
        found: dict[str, tuple[bool, str]] | None = None
        following = dict(state, window=self.window(progress), learning_rate=progress.learning_rate)
        if self.closes(progress, state):
            found = {name: self._judge(state["norms"].get(name), norm) for name, norm in norms.items()}
            following["norms"] = dict(norms)
        before, now = state["learning_rate"], progress.learning_rate
        if before is not None and now is not None and now < (1 - self.learning_rate_drop) * before:
            found = dict.fromkeys(norms, (True, f"the learning rate fell from {before:.3g} to {now:.3g}"))
        return found, following

    def _judge(self, before: float | None, now: float) -> tuple[bool, str]:
        if before is None:
            return True, "first window"
        if before == 0 or not math.isfinite(before) or not math.isfinite(now):
            return True, f"no ratio (gradient norm {before:.3g}, then {now:.3g})"
        ratio = abs(before - now) / before
        extent = "at least" if ratio >= self.eta else "less than"
        return ratio >= self.eta, f"gradient norm changed by {extent} {self.eta:g} ({ratio:.2f})"


@configuration
class Accordion(CriticalRegimes, Controller):
    """Chooses between two levels of compression by how fast the gradient changes.

    1. Every rank adds up its own gradients over a window, before error feedback.
    2. When the window closes, for every matrix: ``ratio = |norm_before - norm_now| / norm_before``
    3. ``ratio >= eta``: a critical regime, `light`; otherwise `heavy`
    4. The first window, or a norm of zero: `light`. When the learning rate drops: `light` until the next window closes.

    Residuals are kept across switches.

    Args:
        light: Compressor in critical regimes.
        heavy: Compressor elsewhere; must send fewer bytes.
        per: Whether to judge each ``parameter`` or the whole ``model``.
        eta, interval, unit, gradient, learning_rate_drop: See `CriticalRegimes`.

    Raises:
        ValueError: A field is out of range, or `light` sends no more than `heavy`.

    References:
        Agarwal et al., "Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification",
        2021, arXiv 2010.16248.
    """

    light: Compressor
    heavy: Compressor
    per: Literal["parameter", "model"] = "parameter"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self.levels, ("light", "heavy"))

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return (self.light, self.heavy)

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        return self.first_state(specs) | {"levels": {spec.name: 0 for spec in specs}}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        judged = state["judged"]
        norms = {name: telemetry.accumulated_norm.get(name, 0.0) for name in judged}
        if self.per == "model":
            norms = {MODEL: total_norm(norms)}
        found, regimes = self.update(telemetry, norms, state["regimes"])
        before: Mapping[str, int] = state["levels"]
        levels, reasons = dict(before), {}
        if found is not None:
            for name in judged:
                critical, reason = found[MODEL if self.per == "model" else name]
                levels[name] = 0 if critical else 1
                reasons[name] = reason.partition(" (")[0]  # one log line for all that switch together
        return Decision(
            state=dict(state, regimes=regimes, levels=levels),
            levels=levels,
            probe=Probe(accumulate=self.accumulate(telemetry.progress)),
            switches=self.switches(before, levels, reasons),
        )


def total_norm(norms: Mapping[str, float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms.values()))
