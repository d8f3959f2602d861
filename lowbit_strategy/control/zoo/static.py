"""Static: the same level for all parameters at all times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import Controller, Decision, State, Telemetry
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.configuration import configuration


@configuration
class Static(Controller):
    """Uses one compressor for all parameters at every step. It is the smallest controller, and a `Guard` may wrap it.

    Args:
        level: The compressor.
    """

    level: Compressor = field(kw_only=False)

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return (self.level,)

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        return {"levels": {spec.name: 0 for spec in specs}}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        return Decision(state=state, levels=state["levels"])
