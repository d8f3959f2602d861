"""The Hugging Face Trainer: one call on a trainer, before ``trainer.train()``.

trainer = Trainer(model, args, train_dataset=...)
attach(trainer, LoCo(bits=4))
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
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

from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.accelerate.binding import Binding, binding_of, wrap_method
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.telemetry.metric_names import is_of_group

__all__ = ["LowBitPlugin", "attach"]

_MARK = "lowbit_strategy"  # in trainer_state.json: this checkpoint is not complete without residuals


def attach(trainer: Trainer, plugin: LowBitPlugin | Compressor | str | None = None) -> Binding:
    """Train with compressed gradient synchronization. Residuals are saved in ``checkpoint-*`` and restored on resume.

    Args:
        trainer: A Trainer that has not trained yet.
        plugin: A compressor such as ``LoCo(bits=4)``, the default; the name of a preset; or a `LowBitPlugin`.

    Raises:
        TypeError: `trainer` is not a Trainer, or `plugin` is none of these.
        ValueError: The trainer has trained, is already compressed, or runs in an unsupported way.
    """
    if plugin is not None and not isinstance(plugin, (Compressor, LowBitPlugin, str)):
        raise TypeError(
            "attach takes a configuration such as LoCo(bits=4), a preset's name such as 'loco2' or a LowBitPlugin, got"
            f" {plugin!r}"
        )
    if not isinstance(trainer, Trainer):
        raise TypeError(f"attach takes a transformers Trainer, got a {type(trainer).__name__}: make the Trainer first")
    if trainer.accelerator._models and binding_of(trainer.accelerator) is None:
        raise ValueError("this Trainer has already trained, uncompressed: call attach before trainer.train()")
    if plugin is None:
        plugin = LowBitPlugin()
    chosen = plugin if isinstance(plugin, LowBitPlugin) else LowBitPlugin(as_compressor(plugin))
    binding = _attach_accelerator(trainer, chosen)

    def create_and_attach(create: Callable[[], None]) -> None:  # a hyperparameter search makes an accelerator per trial
        create()
        _attach_accelerator(trainer, chosen)

    wrap_method(trainer, "create_accelerator_and_postprocess", create_and_attach)
    bind_checkpoints(trainer)
    return binding


def _attach_accelerator(trainer: Trainer, plugin: LowBitPlugin) -> Binding:
    arguments = trainer.args.fsdp_plugin_args
    fsdp_plugin = FullyShardedDataParallelPlugin(**arguments) if arguments is not None else None
    binding = plugin.attach(trainer.accelerator, fsdp_plugin=fsdp_plugin)
    # Read when the accelerator was made; attaching brings FSDP back where there is no GPU.
    trainer.is_fsdp_enabled = getattr(trainer.accelerator.state, "fsdp_plugin", None) is not None
    return binding


def bind_checkpoints(trainer: Trainer) -> None:
    """Save residuals with every checkpoint, load them on resume, and write metrics to the Trainer's log.

    Raises:
        ValueError: The controller would change something that the Trainer decides.
    """
    binding = binding_of(trainer.accelerator)
    controller = binding.plugin.controller if binding is not None else None
    if controller is not None and controller.initial_accumulation is not None:
        raise ValueError(
            f"{type(controller).__name__} changes gradient accumulation, which the Trainer fixes when it begins: use"
            " a different controller, such as Accordion, or your own loop with Accelerate"
        )
    if binding is not None:
        wrap_method(trainer, "save_model", functools.partial(_with_shared_weights, trainer, validates=False))
        wrap_method(trainer, "_load_best_model", functools.partial(_finish_before, trainer))
    if binding is not None and binding.replica is not None:
        binding.replica.adapt_trainer(trainer)
    if any(isinstance(each, ResidualCallback) for each in trainer.callback_handler.callbacks):
        return  # bound for a lowbit_config section, which the script's own plugin replaces
    callback = ResidualCallback(trainer)
    trainer.add_callback(callback)

    def load_and_train(
        train: Callable[..., Any], resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        callback.resume_from = resume_from_checkpoint
        if (current := binding_of(trainer.accelerator)) is not None:
            current.reshard(begins=True)  # the optimizer is about to be made of the model's parameters
            if not current.attached and trainer.model is not None:
                trainer.model_wrapped = trainer.model  # not the module compiled for an evaluation
        return train(resume_from_checkpoint, *args, **kwargs)

    wrap_method(trainer, "train", load_and_train)
    for name in ("evaluate", "predict"):
        wrap_method(trainer, name, functools.partial(_with_shared_weights, trainer, validates=True))


def _with_shared_weights(
    trainer: Trainer, original: Callable[..., Any], *args: Any, validates: bool, **kwargs: Any
) -> Any:
    """Evaluate or save with the weights that all ranks share. After evaluation FSDP2 leaves the outermost module
    gathered, and callbacks would read those weights instead of the shards.
    """
    if (binding := binding_of(trainer.accelerator)) is None:
        return original(*args, **kwargs)
    with binding.shared_weights(validates=validates):
        result = original(*args, **kwargs)
    if validates:
        binding.reshard()
    return result


def _finish_before(trainer: Trainer, load_best: Callable[[], None]) -> None:
    if (binding := binding_of(trainer.accelerator)) is not None:
        binding.finish()
    load_best()


class ResidualCallback(TrainerCallback):
    """Used by `attach`. A hyperparameter search replaces the trainer's accelerator, and the binding with it."""

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
        sync = binding.sync
        num_steps = None if sync is None else sync.step_index + state.max_steps - state.global_step
        binding.loop.follow_trainer(self._log, Path(str(args.output_dir)), num_steps)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics as the Trainer does, whose step is the same, but not to the console, because a large model has
        dozens of groups.
        """
        trainer = self._trainer
        trainer.log({name: value for name, value in metrics.items() if not is_of_group(name)})
        groups = {name: value for name, value in metrics.items() if is_of_group(name)}
        for callback in trainer.callback_handler.callbacks:
            if groups and not isinstance(callback, (PrinterCallback, ProgressCallback)):  # consoles print everything
                callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(groups), model=trainer.model)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if (binding := self._binding()) is not None:
            binding.finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        binding = self._binding()
        if binding is not None and binding.writes_checkpoints and self._saves(args, state):
            with binding.save(os.path.join(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")):
                pass  # the Trainer has written it

    @staticmethod
    def _saves(args: TrainingArguments, state: TrainerState) -> bool:
        """Whether checkpoints need residuals; those that cannot resume training do not."""
        return not args.save_only_model and not state.is_hyper_param_search


def _marks(state: TrainerState) -> dict[str, Any]:
    """The one free-form part of ``trainer_state.json``; a dict once the state exists, despite its annotation."""
    marks: Any = state.stateful_callbacks
    assert isinstance(marks, dict)
    return marks
