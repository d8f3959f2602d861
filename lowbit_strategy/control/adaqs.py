"""AdaQS: more bits as the gradient's mean drowns in its deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from lowbit_strategy.control.base import Controller, Decision, Probe, State, Telemetry, describe_switches
from lowbit_strategy.control.levels import check_order, labels
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration

MODEL = "model"


@configuration
class AdaQS(Controller):
    """Start with the heaviest level; step to a lighter one whenever the mean-to-deviation ratio has fallen enough.

    Early in training a gradient points somewhere: its elements' mean is large against their deviation and coarse codes
    do. Later it is mostly noise around zero, and quantisation error tells.

    1. ``r`` = moving average of ``|mean| / standard deviation`` of the elements, measured every `interval` steps
    2. ``r < factor * r_ref``: one level lighter, and ``r_ref = r``; `r_ref` is the first average otherwise

    The rule is worked out from the method's definition, not from its authors' code, which is not public.

    Args:
        ladder: Configurations from light (many bits) to heavy (few), at least two.
        factor: Fall of the ratio that costs one level, in (0, 1).
        interval: Steps between two measurements.
        ewma: Weight of a new measurement in the average.
        per: Judge each ``parameter`` by itself, or the ``model`` by the mean over its matrices.

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

    def __post_init__(self) -> None:
        if len(self.ladder) < 2:
            raise ValueError("ladder must have at least two configurations, from light to heavy")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must be between 0 and 1, got {self.factor!r}")
        if not 0 < self.ewma <= 1:
            raise ValueError(f"ewma must be in (0, 1], got {self.ewma!r}")
        if not isinstance(self.interval, int) or self.interval < 1:
            raise ValueError(f"interval must be a positive integer, got {self.interval!r}")
        if self.per not in ("parameter", "model"):
            raise ValueError(f"per must be 'parameter' or 'model', got {self.per!r}")
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

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        new = dict(state)
        before = state["levels"]
        reasons: dict[str, str] = {}
        if telemetry.mean_to_std:
            new["ratios"], new["references"], fallen = self._compare(telemetry.mean_to_std, state)
            new["levels"] = dict(before)
            for name in state["judged"]:
                if (MODEL if self.per == "model" else name) in fallen and before[name] > 0:
                    new["levels"][name] = before[name] - 1
                    reasons[name] = f"mean-to-deviation ratio fell below {self.factor:g} of its reference"
        return Decision(
            state=new,
            levels=new["levels"],
            probe=Probe(moments=telemetry.progress.step % self.interval == 0),
            switches=describe_switches(before, new["levels"], labels(self.ladder), reasons),
        )

    def _compare(
        self, measured: Mapping[str, float], state: State
    ) -> tuple[dict[str, float], dict[str, float], set[str]]:
        ratios, references, fallen = dict(state["ratios"]), dict(state["references"]), set()
        for key, value in self._judged(measured, state["judged"]).items():
            old = ratios.get(key)
            ratios[key] = value if old is None else (1 - self.ewma) * old + self.ewma * value
            reference = references.setdefault(key, ratios[key])
            if ratios[key] < self.factor * reference:
                references[key] = ratios[key]
                fallen.add(key)
        return ratios, references, fallen

    def _judged(self, measured: Mapping[str, float], judged: Sequence[str]) -> dict[str, float]:
        values = {name: measured[name] for name in judged if name in measured}
        if self.per == "parameter" or not values:
            return values
        return {MODEL: sum(values.values()) / len(values)}
