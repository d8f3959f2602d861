"""Accordion on the batch size: small batches in critical regimes."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.accordion import MODEL, CriticalRegimes, total_norm
from lowbit_strategy.control.base import Controller, Decision, Probe, State, Switch, Telemetry
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.configuration import configuration


@configuration
class AccordionBatch(CriticalRegimes, Controller):
    """Accordion on the batch size: small batches in critical regimes, large ones otherwise.

    The batch grows by gradient accumulation, and the learning rate grows linearly with it. As published, the batch
    never shrinks, so a learning-rate decay does not make it small again.

    With a large batch an epoch has fewer optimizer steps, so learning-rate schedules (or a `Schedule` of compressors)
    should count epochs, as in the paper.

    Args:
        small: Batches accumulated per step in critical regimes.
        large: Batches accumulated per step otherwise.
        eta, interval, unit, gradient, learning_rate_drop: See `Accordion`, here for the whole model.
    """

    small: int = 1
    large: int = 8

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

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        return self.first_state(specs) | {"accumulation": self.small}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        norm = total_norm({name: telemetry.accumulated_norm.get(name, 0.0) for name in state["judged"]})
        found, regimes = self.update(telemetry, {MODEL: norm}, state["regimes"])
        accumulation = state["accumulation"]
        switches: tuple[Switch, ...] = ()
        if found is not None and not found[MODEL][0] and accumulation != self.large:
            switches = (Switch("batch", f"x{accumulation}", f"x{self.large}", found[MODEL][1]),)
            accumulation = self.large
        return Decision(
            state=dict(state, regimes=regimes, accumulation=accumulation),
            probe=Probe(accumulate=self.accumulate(telemetry.progress)),
            switches=switches,
            accumulation=accumulation,
            learning_rate_factor=accumulation / self.small,
        )
