"""Attaching to a Trainer: its accelerator, and its checkpoints, which do not go through Accelerate's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer

from lowbit_strategy.accelerate.binding import Binding, binding_of, wrap_method
from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.transformers.checkpoints import ResidualCallback
from lowbit_strategy.transformers.replica import follow, join_in


def attach(trainer: Trainer, plugin: LowBitPlugin | Compressor | str | None = None) -> Binding:
    """Train with compressed gradient synchronisation; residuals go into ``checkpoint-*`` and come back on resume.

    Args:
        trainer: A Trainer that has not trained yet.
        plugin: A compressor's configuration such as ``LoCo(bits=4)``, the default, the name of a preset, or a
            `LowBitPlugin`.

    Raises:
        TypeError: `trainer` is no Trainer, or `plugin` is neither.
        ValueError: The trainer has trained, is compressed already, or runs in a way that cannot be served.
    """
    if plugin is not None and not isinstance(plugin, (Compressor, LowBitPlugin, str)):
        raise TypeError(
            "attach takes a configuration such as LoCo(bits=4), a preset's name such as 'loco2' or a LowBitPlugin, got"
            f" {plugin!r}"
        )
    if not isinstance(trainer, Trainer):
        raise TypeError(f"attach takes a transformers Trainer, got a {type(trainer).__name__}: make the Trainer first")
    if trainer.accelerator._models and binding_of(trainer.accelerator) is None:
        raise ValueError("this Trainer has trained already, uncompressed: call attach before trainer.train()")
    if plugin is None:
        plugin = LowBitPlugin()
    chosen = plugin if isinstance(plugin, LowBitPlugin) else LowBitPlugin(as_compressor(plugin))
    binding = _attach_accelerator(trainer, chosen)

    def create_and_attach(create: Callable[[], None]) -> None:  # a hyperparameter search makes one for every trial
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
    """Save residuals with every checkpoint, load them with the one that is resumed from; figures into its log.

    Raises:
        ValueError: The controller would set what the Trainer decides.
    """
    binding = binding_of(trainer.accelerator)
    controller = binding.plugin.controller if binding is not None else None
    if controller is not None and controller.initial_accumulation is not None:
        raise ValueError(
            f"{type(controller).__name__} changes gradient accumulation, which the Trainer fixes when it begins: use"
            " another controller, such as Accordion, or a loop of your own with Accelerate"
        )
    if binding is not None and binding.plugin.outer is not None:
        wrap_method(trainer, "save_model", functools.partial(_with_shared_weights, trainer, validates=False))
        wrap_method(trainer, "_load_best_model", functools.partial(_finish_before, trainer))
    if binding is not None and binding.replica is not None:
        join_in(trainer)
    if any(isinstance(each, ResidualCallback) for each in trainer.callback_handler.callbacks):
        return  # bound for a lowbit_config section, in whose place the script puts a plugin of its own
    callback = ResidualCallback(trainer)
    trainer.add_callback(callback)

    def load_and_train(
        train: Callable[..., Any], resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        callback.resume_from = resume_from_checkpoint
        if (current := binding_of(trainer.accelerator)) is not None:
            current.reshard(begins=True)  # the optimizer is about to be made of the model's parameters
            follow(trainer, current)
        return train(resume_from_checkpoint, *args, **kwargs)

    wrap_method(trainer, "train", load_and_train)
    for name in ("evaluate", "predict"):
        wrap_method(trainer, name, functools.partial(_with_shared_weights, trainer, validates=True))


def _with_shared_weights(
    trainer: Trainer, original: Callable[..., Any], *args: Any, validates: bool, **kwargs: Any
) -> Any:
    """Local steps: what is evaluated and saved is what all ranks share. FSDP2 leaves the outermost module gathered when
    it has evaluated, and callbacks would read those weights and not the shards.
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
