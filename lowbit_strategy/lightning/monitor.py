"""CompressionMonitor: error, bytes and time of compression in the trainer's loggers. Independent of the namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit_strategy.control.groups import GroupBy
from lowbit_strategy.control.guard import Bounds
from lowbit_strategy.lightning.control_callback import ControlCallbackMixin, Where
from lowbit_strategy.options.configuration import refusing_unknown_options
from lowbit_strategy.telemetry.model_control import ModelControl
from lowbit_strategy.telemetry.monitor_options import MonitorOptions
from lowbit_strategy.telemetry.observe import Observation

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object


class CompressionMonitorMixin(ControlCallbackMixin, _Base):
    """See `lowbit_strategy.lightning.CompressionMonitor`."""

    @refusing_unknown_options
    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        group_by: GroupBy = "kind",
        bounds: Bounds | None = None,
        progress_bar: bool = True,
        record: Where = True,
    ) -> None:
        super().__init__(record)
        self.options = MonitorOptions(every_n_steps=every_n_steps, group_by=group_by, bounds=bounds)
        self.progress_bar = progress_bar
        self.last: Observation | None = None

    def add_part(self, control: ModelControl) -> None:
        control.monitor(self.options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        observation = self.control.last if self.control is not None else None
        if observation is None or observation is self.last:
            return
        self.last = observation
        if self.progress_bar:
            pl_module.log_dict(
                {"error": observation.total.relative_error, "bits": observation.total.bits_per_element},
                prog_bar=True,
                logger=False,
                on_step=True,
                on_epoch=False,
                batch_size=1,
            )

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.control is None or trainer.sanity_checking:
            return
        self.control.validated(
            {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        )
