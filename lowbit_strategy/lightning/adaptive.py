"""AdaptiveCompression: a controller in a Lightning run. Independent of the Lightning namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit_strategy.control.base import Controller
from lowbit_strategy.lightning.control_callback import ControlCallbackMixin, Where
from lowbit_strategy.options.configuration import refusing_unknown_options
from lowbit_strategy.telemetry.adaptive_driver import AdaptiveDriver
from lowbit_strategy.telemetry.model_control import ModelControl

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class AdaptiveCompressionMixin(ControlCallbackMixin, _Base):
    """See `lowbit_strategy.lightning.AdaptiveCompression`."""

    @refusing_unknown_options
    def __init__(self, controller: Controller, *, record: Where = True) -> None:
        super().__init__(record)
        if not isinstance(controller, Controller):
            raise TypeError(f"controller must be one of lowbit_strategy.control, got {controller!r}")
        self.controller = controller

    @property
    def driver(self) -> AdaptiveDriver | None:
        """The controller at work, from set-up of a fit on: levels in force, state."""
        return self.control.driver if self.control is not None else None

    def add_part(self, control: ModelControl) -> None:
        control.adapt(self.controller)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._take_effect(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_effect(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.control is not None:
            self.control.scale_learning_rates_(optimizer)  # put back when the engine ends the step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        driver = self.driver
        if driver is not None and driver.accumulation is not None:
            done = batch_idx + 1  # a change of window must fall on the end of an old one and the start of a new one
            if done % trainer.accumulate_grad_batches == 0 and done % driver.accumulation == 0:
                self._take_effect(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _take_effect(self, trainer: Any) -> None:
        """Bring accumulation and learning rate to what the controller has set; at the boundary of a window."""
        wanted = self.control.take_effect() if self.control is not None else None
        if wanted is not None:
            trainer.accumulate_grad_batches = wanted
