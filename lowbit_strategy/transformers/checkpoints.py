"""Residuals in the Trainer's checkpoints: written after each, read before the first step of a resumed run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from lowbit_strategy.accelerate.binding import Binding

_MARK = "lowbit_strategy"  # in trainer_state.json: this checkpoint is not complete without residuals


class ResidualCallback(TrainerCallback):
    """Internal to `attach`.

    Args:
        binding: Gives the binding of the trainer's accelerator, which a hyperparameter search replaces.
    """

    def __init__(self, binding: Callable[[], Binding | None]) -> None:
        self._binding = binding
        self.resume_from: str | bool | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        binding = self._binding()
        if binding is None:
            return
        folder = get_last_checkpoint(args.output_dir) if self.resume_from is True else self.resume_from
        if folder:
            binding.load(folder, compressed=_MARK in _marks(state))
        if binding.attachments and self._saves(args, state):
            _marks(state)[_MARK] = {}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        binding = self._binding()
        if binding is not None and self._saves(args, state):
            binding.save(os.path.join(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    @staticmethod
    def _saves(args: TrainingArguments, state: TrainerState) -> bool:
        """Checkpoints that training cannot go on from need no residuals."""
        return not args.save_only_model and not state.is_hyper_param_search


def _marks(state: TrainerState) -> dict[str, Any]:
    """The one free-form part of ``trainer_state.json``; a dict once the state exists, whatever its annotation says."""
    marks: Any = state.stateful_callbacks
    assert isinstance(marks, dict)
    return marks
