"""Residuals in the Trainer's checkpoints: written after each, read before the first step of a resumed run. Before that
step controllers and the monitor are given what the Trainer knows: the length of the run, its folder, its loggers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lowbit_strategy.accelerate.binding import Binding, binding_of
from lowbit_strategy.telemetry.metric_format import is_of_group

_MARK = "lowbit_strategy"  # in trainer_state.json: this checkpoint is not complete without residuals


class ResidualCallback(TrainerCallback):
    """Internal to `attach`. A hyperparameter search replaces the trainer's accelerator, and the binding with it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.resume_from: str | bool | None = None

    def _binding(self) -> Binding | None:
        return binding_of(self._trainer.accelerator)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        binding = self._binding()
        if binding is None:
            return
        folder = get_last_checkpoint(args.output_dir) if self.resume_from is True else self.resume_from
        if folder:
            binding.load(folder, compressed=_MARK in _marks(state))
        binding.resume()
        self._control(binding, args, state)
        if binding.sessions and self._saves(args, state):
            _marks(state)[_MARK] = {}

    def _control(self, binding: Binding, args: TrainingArguments, state: TrainerState) -> None:
        adaptive, sync = binding.adaptive, binding.sync
        adaptive.log = lambda metrics, step: self._log(metrics)  # the Trainer's own step is the same
        adaptive.has_log = lambda: True  # its own history at least
        if binding.plugin.record is True:
            adaptive.folder = Path(str(args.output_dir))
        if binding.plugin.num_steps is None and sync is not None:
            adaptive.clock.num_steps = sync.step_index + state.max_steps - state.global_step

    def _log(self, metrics: dict[str, float]) -> None:
        """As the Trainer logs its own; a large model has dozens of groups, which no console should print."""
        trainer = self._trainer
        trainer.log({name: value for name, value in metrics.items() if not is_of_group(name)})
        groups = {name: value for name, value in metrics.items() if is_of_group(name)}
        for callback in trainer.callback_handler.callbacks if groups else ():
            if not isinstance(callback, (PrinterCallback, ProgressCallback)):  # consoles, which print all that they get
                callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(groups), model=trainer.model)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if (binding := self._binding()) is not None:
            binding.finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        binding = self._binding()
        if binding is not None and binding.writes_checkpoints and self._saves(args, state):
            binding.save(os.path.join(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    @staticmethod
    def _saves(args: TrainingArguments, state: TrainerState) -> bool:
        """Checkpoints that training cannot go on from need no residuals."""
        return not args.save_only_model and not state.is_hyper_param_search


def _marks(state: TrainerState) -> dict[str, Any]:
    """The one free-form part of ``trainer_state.json``; a dict once the state exists, in spite of its annotation."""
    marks: Any = state.stateful_callbacks
    assert isinstance(marks, dict)
    return marks
