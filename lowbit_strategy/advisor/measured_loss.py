"""What set-ups cost in validation loss and in steps, as far as it was measured.

The figures are those of `benchmarks/results`, which a test compares. A star means with ``second_moment=True``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quality = Literal["same", "close", "worse", "unmeasured", "local"]

_CLOSE = 0.5  # per cent, of the model where it is worst
_CERTAIN = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class Loss:
    """Against the same run without compression.

    Args:
        model: That was trained.
        percent: By how much the loss is higher, the mean of the seeds.
        error: Standard error of that mean; None: of one seed.
        seeds: How many.
    """

    model: str
    percent: float
    error: float | None
    seeds: int

    @property
    def excess(self) -> float:
        """Excess loss beyond two standard errors; the raw gap if there is only one seed."""
        return self.percent if self.error is None else self.percent - _CERTAIN * self.error

    def __str__(self) -> str:
        return f"{self.percent:+.1f}" + ("" if self.error is None else f"±{self.error:.1f}")


@dataclass(frozen=True, slots=True)
class MoreSteps:
    """Per cent more steps than uncompressed training needs to the same loss.

    Means of three seeds and more, of the model where they are most, at the learning rate that is best without
    compression or at a quarter of it.

    Args:
        constant: At a constant rate, to the loss that uncompressed training has after three quarters of its run.
        decaying: With a cosine to zero, of a whole run whose schedule is as much longer, to the last loss.
    """

    constant: float
    decaying: float

    @property
    def worst(self) -> float:
        return max(self.constant, self.decaying)

    @property
    def times(self) -> float:
        """How many times the steps of uncompressed training."""
        return 1 + max(0.0, self.worst) / 100

    def __str__(self) -> str:
        return f"{self.worst:+.0f}"


# From `low_bits.json` and `low_bits_loco4.json` (1,500 steps, 4 ranks); of local steps `outer_steps_transformer.json`
# (3,000 steps); with a star `second_moment.json` (400 steps, 4 ranks); of gpt, ten million parameters,
# `large_model.json` (1,000 steps, 4 ranks). Their runs of loco4 are of what is loco now, and those of loco of what is
# loco_uniform.
LOSSES: dict[str, tuple[Loss, ...]] = {
    "bf16": (
        Loss("convolutional", 0.001, 0.002, 5),
        Loss("recurrent", -0.016, 0.053, 5),
        Loss("transformer", 0.052, 0.172, 5),
        Loss("gpt", -0.148, 0.046, 3),
    ),
    "loco_uniform": (
        Loss("convolutional", -0.126, 0.016, 5),
        Loss("recurrent", -0.166, 0.109, 5),
        Loss("transformer", -1.549, 0.698, 5),
        Loss("gpt", -0.392, 0.242, 3),
    ),
    "loco": (
        Loss("convolutional", -0.130, 0.061, 5),
        Loss("recurrent", -0.012, 0.153, 5),
        Loss("transformer", -0.428, 0.412, 5),
        Loss("gpt", -0.050, 0.474, 3),
    ),
    "loco2": (
        Loss("convolutional", 0.048, 0.053, 10),
        Loss("recurrent", -0.029, 0.097, 10),
        Loss("transformer", 0.110, 0.429, 10),
        Loss("gpt", -0.220, 0.304, 3),
    ),
    "loco1": (
        Loss("convolutional", 0.332, 0.092, 10),
        Loss("recurrent", 0.004, 0.088, 10),
        Loss("transformer", 0.306, 0.437, 10),
        Loss("gpt", -0.636, 0.325, 3),
    ),
    "loco2*": (Loss("mixer", 0.021, 0.482, 3), Loss("recurrent", -0.182, 0.292, 3), Loss("lstm", -0.666, 0.072, 3)),
    "loco1*": (
        Loss("mixer", 0.073, 0.245, 3),
        Loss("recurrent", 0.115, 0.490, 3),
        Loss("lstm", -0.903, 0.524, 3),
        Loss("gpt", -1.193, 0.515, 3),
    ),
    "powersgd": (
        Loss("convolutional", 2.752, None, 1),
        Loss("recurrent", 3.847, None, 1),
        Loss("gpt", 11.391, 0.658, 3),
    ),
    "diloco": (Loss("transformer", 8.673, 0.281, 3), Loss("gpt", 30.024, 0.824, 3)),
}

# From `second_moment.json`, `second_moment_decay.json` and `second_moment_gpt.json`: 400 steps, 4 ranks. Of the
# last one's model, of 2.5 million parameters, the falling rate counts, at which more steps are needed.
STEPS: dict[str, MoreSteps] = {
    "loco_uniform": MoreSteps(1.9, 9.1),
    "loco": MoreSteps(0.9, 1.0),
    "loco2": MoreSteps(6.0, 6.9),
    "loco2*": MoreSteps(1.1, 6.9),
    "loco1": MoreSteps(20.8, 19.7),
    "loco1*": MoreSteps(1.0, 1.5),
}


def steps_of(name: str) -> float:
    """How many times the steps of uncompressed training, to the same loss; 1 where it was not measured."""
    return STEPS[name].times if name in STEPS else 1.0


def worst_loss(name: str) -> Loss | None:
    """Of the model where it costs most; None: it was not measured."""
    return max(LOSSES.get(name, ()), key=lambda loss: loss.percent, default=None)


def quality_of(name: str, bits: float) -> Quality:
    """How a preset with `bits` per element may be used.

    ``same``: 4 bits and more, and no loss of a model is higher by more than chance. ``close``: at most half a per cent
    higher on every model. ``worse``: more than that. ``unmeasured``: nobody knows.
    """
    losses = LOSSES.get(name)
    if not losses:
        return "unmeasured"
    if bits >= 4 and all(loss.excess <= 0 for loss in losses):
        return "same"
    return "close" if all(loss.percent <= _CLOSE for loss in losses) else "worse"
