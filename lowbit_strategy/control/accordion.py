"""Accordion: compress lightly while the gradient changes fast, heavily otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from lowbit_strategy.control.base import Accumulate, Controller, Decision, Probe, Progress, State, Switch, Telemetry
from lowbit_strategy.control.levels import check_order
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.documentation import documented_options

MODEL = "model"  # the name under which the whole model is judged
Unit = Literal["epochs", "steps"]


@configuration
class CriticalRegimes:
    """What both kinds of Accordion share: the norm of the accumulated gradient against that of one interval ago.

    `Accordion` has the steps. A window is the last `interval` steps, or one whole epoch in `interval`.

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
    ) -> tuple[dict[str, tuple[bool, str]] | None, State]:
        """One step.

        Args:
            telemetry: Of the step.
            norms: Of what is asked about, by name; only looked at when a window closes.
            state: What the step before has left.
            comparable: Whether the window that closes is of the same kind as the one before. If not it only becomes
                what the next one is compared with.

        Returns:
            For each of `norms` whether it is critical now, and why; None if that was not asked at this step. Then the
            next state.
        """
        progress = telemetry.progress
        found: dict[str, tuple[bool, str]] | None = None
        following = dict(state, window=self.window(progress), learning_rate=progress.learning_rate)
        if self.closes(progress, state):
            if comparable or not state["norms"]:
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


@documented_options(CriticalRegimes)
@configuration
class Accordion(CriticalRegimes, Controller):
    """Two levels of compression, chosen by how fast the gradient changes.

    1. Every rank adds up its own gradients over a window, before error feedback.
    2. When the window closes, for every matrix: ``ratio = |norm_before - norm_now| / norm_before``
    3. ``ratio >= eta``: a critical regime, `light`; otherwise `heavy`
    4. The first window, a norm of zero: `light`. When the learning rate falls: `light` at once, until the next window
       closes.

    Residuals are kept across switches.

    Args:
        light: What a critical regime gets.
        heavy: What the rest gets; must send fewer bytes.
        per: Judge each ``parameter`` by itself, or the ``model`` as one.
        @CriticalRegimes: eta, interval, unit, gradient and learning_rate_drop; filled in from there.

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

    def init(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool = False) -> State:
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
                reasons[name] = reason.partition(" (")[0]  # one line for all that switch together
        return Decision(
            state=dict(state, regimes=regimes, levels=levels),
            levels=levels,
            probe=Probe(accumulate=self.accumulate(telemetry.progress)),
            switches=self.switches(before, levels, reasons),
        )


@configuration
class AccordionBatch(CriticalRegimes, Controller):
    """Accordion on the batch size: small batches in critical regimes, large ones otherwise.

    The batch is changed through gradient accumulation, the learning rate follows linearly. As published the batch only
    grows: once large it stays large, so that a later learning-rate decay does not shrink it again.

    A large batch has fewer optimizer steps per epoch. A learning-rate schedule (or a `Schedule` of compressors) that
    counts optimizer steps then reaches its stages later in the data than it would with small batches: let it count
    epochs, as the publication does.

    Args:
        small: Batches accumulated into one step in critical regimes.
        large: The same elsewhere.
        eta, interval, unit, gradient, learning_rate_drop: See `Accordion`; judged on the whole model.
        only_grows: False lets the batch shrink in a later critical regime. With ``unit="steps"`` two windows are
            compared only if their batches are of one size, since noise in a mean falls with the batch: after a change
            of the batch one window passes without a decision.

    Raises:
        ValueError: A field is out of range.
    """

    small: int = 1
    large: int = 8
    only_grows: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.small < self.large:
            raise ValueError(f"1 <= small < large must hold, got small={self.small!r} and large={self.large!r}")
        super().__post_init__()

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return ()

    @property
    def initial_accumulation(self) -> int:
        return self.small

    def init(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool = False) -> State:
        batches = [self.small, self.small]  # of the window before and of this one; 0: of several sizes
        return self.first_state(specs) | {"accumulation": self.small, "batches": batches}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        norms = {name: telemetry.accumulated_norm.get(name, 0.0) for name in state["judged"]}
        # Gradients are means over a step's batches. A window of one epoch has fewer of them where batches are larger,
        # and a smaller sum; a window in steps has as many as ever.
        norm = total_norm(norms) * (state["accumulation"] if self.unit == "epochs" else 1)
        earlier, present = state["batches"]
        comparable = self.unit == "epochs" or earlier == present != 0
        found, regimes = self.update(telemetry, {MODEL: norm}, state["regimes"], comparable=comparable)
        before = accumulation = state["accumulation"]
        switches: tuple[Switch, ...] = ()
        if found is not None:
            critical, reason = found[MODEL]
            wanted = self.small if critical else self.large
            accumulation = max(before, wanted) if self.only_grows else wanted
            if accumulation != before:
                switches = (Switch("batch", f"x{before}", f"x{accumulation}", reason),)
        if self.reads_accumulated(telemetry.progress, state):
            batches = [present, accumulation]
        else:
            batches = [earlier, present if accumulation == before else 0]
        return Decision(
            state=dict(state, regimes=regimes, accumulation=accumulation, batches=batches),
            probe=Probe(accumulate=self.accumulate(telemetry.progress)),
            switches=switches,
            accumulation=accumulation,
            learning_rate_factor=accumulation / self.small,
        )


def total_norm(norms: Mapping[str, float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms.values()))
