"""The learning rates of the optimizers that step an engine's model."""

from __future__ import annotations

from collections.abc import Mapping


class LearningRates:
    """Knows the current learning rates. This base class knows none."""

    def rates(self) -> Mapping[str, float]:
        """The learning rate of each parameter that an optimizer steps."""
        return {}

    def first_rate(self) -> float | None:
        """The learning rate of the first parameter group; None: no optimizer is known to step the model."""
        return None
