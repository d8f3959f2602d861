"""CompressionMonitor: error, bytes and time of compression in the trainer's loggers. Independent of the namespace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lowbit_strategy.control.groups import GroupBy, check_group_by
from lowbit_strategy.control.guard import Bounds, Reading
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.lightning.run_folder import Where, listen, log_metrics, open_record
from lowbit_strategy.telemetry.custom_loop import figures_to_log, record_fields, start_fields
from lowbit_strategy.telemetry.observe import Figures, Observation, Observer
from lowbit_strategy.telemetry.run_record import RunRecord

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

_log = logging.getLogger("lowbit_strategy")


class CompressionMonitorMixin(_Base):
    """See `lowbit_strategy.lightning.CompressionMonitor`."""

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        group_by: GroupBy = "kind",
        bounds: Bounds | None = None,
        progress_bar: bool = True,
        record: Where = True,
    ) -> None:
        super().__init__()
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a positive integer, got {every_n_steps!r}")
        check_group_by(group_by)
        self.every_n_steps = every_n_steps
        self.group_by = group_by
        self.bounds = bounds
        self.progress_bar = progress_bar
        self.record = record
        self.last: Observation | None = None
        self._bounds_state = bounds.init() if bounds is not None else {}
        self._fresh: Observation | None = None
        self._record: RunRecord | None = None
        self._observer: Observer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            listen(trainer, "CompressionMonitor", self._attach)

    def _attach(self, sync: GradientSync) -> None:
        self._observer = Observer(
            sync, lambda step: step % self.every_n_steps == 0, group_by=self.group_by, on_observation=self._take
        )

    def _take(self, observation: Observation) -> None:
        self.last = self._fresh = observation

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._record = open_record(trainer, self.record)
        if self._record is not None and self._observer is not None:
            sync = self._observer.sync
            self._record.write(
                "start",
                sync.step_index,
                strategy=type(trainer.strategy).__name__,
                num_steps=_finite(trainer.max_steps),
                **start_fields(sync, self.every_n_steps),
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._fresh is None:
            return
        observation, self._fresh = self._fresh, None
        log_metrics(trainer, figures_to_log(observation), observation.step)
        if self.progress_bar:
            pl_module.log_dict(
                {"error": observation.total.relative_error, "bits": observation.total.bits_per_element},
                prog_bar=True,
                logger=False,
                on_step=True,
                on_epoch=False,
                batch_size=1,
            )
        self._check(observation)
        if self._record is not None:
            fields = record_fields(observation)
            self._record.write(
                "observation", observation.step, epoch=trainer.current_epoch, loss=_loss(outputs), **fields
            )

    def _check(self, observation: Observation) -> None:
        """Warn of groups that left their bounds, on rank 0; all ranks count alike."""
        if self.bounds is None:
            return
        readings = {group: _reading(figures) for group, figures in observation.groups.items()}
        verdict = self.bounds.update(readings, self._bounds_state)
        self._bounds_state = verdict.state
        times = f"{self.bounds.patience} times in a row"
        texts = [f"{group}: {reason}, {times}" for group, reason in verdict.raised.items()]
        texts += [f"{group}: within its bounds again" for group in verdict.cleared]
        assert self._observer is not None
        for text in texts if self._observer.sync.comm.rank == 0 else ():
            _log.warning("step %d: compression of %s", observation.step, text)
            if self._record is not None:
                self._record.write("warning", observation.step, text=text)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._record is None or self._observer is None or trainer.sanity_checking:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        self._record.write("validation", self._observer.sync.step_index, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"bounds": self._bounds_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._bounds_state = state_dict["bounds"] or self._bounds_state


def _reading(figures: Figures) -> Reading:
    ratio = figures.residual_norm / figures.compensated_norm if figures.compensated_norm > 0 else 0.0
    return Reading(figures.relative_error, ratio)


def _loss(outputs: Any) -> float | None:
    """The training step's loss, whatever the step returned."""
    if isinstance(outputs, dict):
        outputs = outputs.get("loss")
    return float(outputs) if outputs is not None else None


def _finite(steps: int) -> int | None:
    return steps if steps > 0 else None
