"""One configuration from start to end: the controller that a guard wraps when nothing else decides."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.control.base import Controller, Decision, State, Telemetry
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import positional_configuration


@positional_configuration
class Static(Controller):
    """Every parameter has the same level at every step.

    Args:
        level: The compressor.
    """

    level: Compressor

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return (self.level,)

    def init(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool = False) -> State:
        return {"levels": {spec.name: 0 for spec in specs}}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        return Decision(state=state, levels=state["levels"])
