"""AdaQS: lighter levels as the mean of gradients becomes small compared with their noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.accordion import MODEL
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
from lowbit_strategy.control.grouping import GroupBy, grouped
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.configuration import configuration


@configuration
class AdaQS(Controller):
    """Starts with the heaviest level, and becomes one level lighter whenever the mean-to-deviation ratio has fallen
    enough.

    Early in training, gradients of different batches agree: their mean is large compared with their deviation, and
    coarse codes suffice. Later they are mostly noise around a small mean, and quantization errors hurt.

    1. Over `interval` steps, with g the gradient of one step, for every matrix: ``r = |E g| / sqrt(E |g - E g|^2)``,
       with Euclidean norms of whole parameters. Both squares are estimated without bias; otherwise the noise left in a
       mean of n gradients would keep r above about ``1 / sqrt(n)``.
    2. ``r`` is a moving average. ``r < factor * r_ref``: one level lighter, and ``r_ref = r``. The first ``r_ref`` is
       the first average.

    With an average of 0 (no mean above the noise) it goes to the lightest level, one level at a time.

    This is derived from the paper, since the authors' code is not public. The ratio is taken over steps, because the
    mean of a single gradient's elements is always close to 0.

    Args:
        ladder: At least two configurations, from light (many bits) to heavy (few).
        factor: Relative drop of the ratio per level, in (0, 1).
        interval: Steps per ratio, at least 2. Longer: smaller ratios can be measured.
        ewma: Weight of a new ratio in the average.
        per: Whether to judge each ``parameter``, or the ``model`` by the norms of all its matrices together.
        gradient: ``local``: each rank's own gradients; needs a float32 copy of the model on every rank. ``mean``: the
            mean over ranks, under FSDP2 a shard; less noise, but it includes the noise of the current codes.

    Raises:
        ValueError: A field is out of range or the ladder is not in order.

    References:
        Guo et al., "Accelerating Distributed Deep Learning By Adaptive Gradient Quantization", ICASSP 2020.
    """

    ladder: tuple[Compressor, ...]
    factor: float = 0.5
    interval: int = 10
    ewma: float = 0.2
    per: Literal["parameter", "model"] = "model"
    gradient: Accumulate = "local"

    def __post_init__(self) -> None:
        if len(self.ladder) < 2:
            raise ValueError("ladder must have at least two configurations, from light to heavy")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must be between 0 and 1, got {self.factor!r}")
        if not 0 < self.ewma <= 1:
            raise ValueError(f"ewma must be in (0, 1], got {self.ewma!r}")
        if self.interval < 2:
            raise ValueError(f"interval must be at least 2, got {self.interval!r}: one gradient has no deviation")
        check_order(self.ladder, [f"ladder[{at}]" for at in range(len(self.ladder))])

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return self.ladder

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        heaviest = len(self.ladder) - 1
        return {
            "levels": {spec.name: heaviest for spec in specs},
            "judged": [spec.name for spec in specs if spec.ndim > 1],
            "ratios": {},
            "references": {},
        }

    def reads_accumulated(self, progress: Progress, state: State) -> bool:
        return progress.step > 0 and progress.step % self.interval == 0

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        levels, ratios, references = dict(state["levels"]), dict(state["ratios"]), dict(state["references"])
        reasons: dict[str, str] = {}
        by: GroupBy = (lambda _: MODEL) if self.per == "model" else "parameter"
        judged = state["judged"] if telemetry.accumulated_steps > 1 else ()
        for key, names in grouped(judged, by).items():
            if (ratio := mean_to_deviation(telemetry, names)) is None:
                continue
            ratios[key] = (1 - self.ewma) * ratios[key] + self.ewma * ratio if key in ratios else ratio
            if ratios[key] < self.factor * references.setdefault(key, ratios[key]):
                references[key] = ratios[key]
                for name in names:
                    levels[name] = max(levels[name] - 1, 0)
                    reasons[name] = f"mean-to-deviation ratio fell below {self.factor:g} of its reference"
        return Decision(
            state=dict(state, levels=levels, ratios=ratios, references=references),
            levels=levels,
            probe=Probe(accumulate=self.gradient, square=True),
            switches=self.switches(state["levels"], levels, reasons),
        )


def mean_to_deviation(telemetry: Telemetry, names: Iterable[str]) -> float | None:
    """The ratio over the accumulated steps for all parameters together; None if gradients are equal or not finite.

    With n steps, the squared norm S of the sum, and the sum Q of squared norms, the variance is ``(Q - S / n) / (n -
    1)``, and the squared mean is ``S / n^2`` minus an n-th of it, or 0 if that is negative.
    """
    names, n = list(names), telemetry.accumulated_steps
    total = sum(telemetry.accumulated_norm.get(name, 0.0) ** 2 for name in names)
    squares = sum(telemetry.accumulated_square.get(name, 0.0) for name in names)
    noise = (squares - total / n) / (n - 1)
    if not (math.isfinite(noise) and noise > 0.0):
        return None
    return math.sqrt(max(total / n**2 - noise / n, 0.0) / noise)
