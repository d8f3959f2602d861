"""Attaching to a Trainer: its accelerator, and its checkpoints, which do not go through Accelerate's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import wrapt
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import Trainer

from lowbit_strategy.accelerate.binding import Binding, binding_of
from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.transformers.checkpoints import ResidualCallback
from lowbit_strategy.transformers.metrics import log_metrics
from lowbit_strategy.transformers.replica import follow, join_in


def attach(trainer: Trainer, plugin: LowBitPlugin | Compressor | str | None = None) -> Binding:
    """Train with compressed gradient synchronisation; residuals go into ``checkpoint-*`` and come back on resume.

    Args:
        trainer: A Trainer that has not trained yet.
        plugin: A compressor's configuration such as ``LoCo(bits=4)``, the default, the name of a preset, or a
            `LowBitPlugin`.

    Raises:
        TypeError: `plugin` is neither.
        ValueError: The trainer has prepared its model, is compressed already (``lowbit launch`` does that), or runs
            in a way that cannot be served.
    """
    if plugin is not None and not isinstance(plugin, (Compressor, LowBitPlugin, str)):
        raise TypeError(
            "attach takes a configuration such as LoCo(bits=4), a preset's name such as 'loco2' or a LowBitPlugin, got"
            f" {plugin!r}"
        )
    if plugin is None:
        plugin = LowBitPlugin()
    chosen = plugin if isinstance(plugin, LowBitPlugin) else LowBitPlugin(as_compressor(plugin))
    binding = _attach_accelerator(trainer, chosen)
    create = trainer.create_accelerator_and_postprocess

    @functools.wraps(create)
    def create_and_attach() -> None:  # a hyperparameter search makes an accelerator for every trial
        create()
        _attach_accelerator(trainer, chosen)

    trainer.create_accelerator_and_postprocess = create_and_attach  # type: ignore[method-assign]
    bind_checkpoints(trainer)
    return binding


def _attach_accelerator(trainer: Trainer, plugin: LowBitPlugin) -> Binding:
    arguments = trainer.args.fsdp_plugin_args
    fsdp_plugin = FullyShardedDataParallelPlugin(**arguments) if arguments is not None else None
    binding = plugin.attach(trainer.accelerator, fsdp_plugin=fsdp_plugin)
    # Read when the accelerator was made; attaching brings FSDP back where there is no GPU.
    trainer.is_fsdp_enabled = getattr(trainer.accelerator.state, "fsdp_plugin", None) is not None
    return binding


def bind_every_trainer(module: Any) -> None:
    """For scripts that know nothing of us: `module` is ``transformers.trainer``, just imported."""
    wrapt.wrap_function_wrapper(module, "Trainer.__init__", _made)


def _made(wrapped: Callable[..., None], instance: Trainer, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    bind_checkpoints(instance)


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
    callback = ResidualCallback(lambda: binding_of(trainer.accelerator), functools.partial(log_metrics, trainer))
    trainer.add_callback(callback)
    train = trainer.train

    @functools.wraps(train)
    def train_and_load(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callback.resume_from = resume_from_checkpoint
        if (current := binding_of(trainer.accelerator)) is not None:
            current.reshard(begins=True)  # the optimizer is about to be made of the model's parameters
            follow(trainer, current)
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = train_and_load  # type: ignore[method-assign]
    if binding is not None and binding.plugin.outer is not None:
        _share_weights(trainer)
    if binding is not None and binding.replica is not None:
        join_in(trainer)
    for name in ("evaluate", "predict"):
        setattr(trainer, name, _and_reshard(trainer, getattr(trainer, name)))


def _and_reshard(trainer: Trainer, original: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 leaves the outermost module gathered, and callbacks would read those weights and not the shards."""

    @functools.wraps(original)
    def and_reshard(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (current := binding_of(trainer.accelerator)) is not None:
            current.reshard()
        return result

    return and_reshard


def _share_weights(trainer: Trainer) -> None:
    """Local steps: what is evaluated and saved is what all ranks share."""
    for name in ("evaluate", "predict", "save_model"):
        original = getattr(trainer, name)
        setattr(trainer, name, _with_shared_weights(trainer, original, validates=name != "save_model"))
    load_best = trainer._load_best_model

    @functools.wraps(load_best)
    def finish_and_load() -> None:
        if (current := binding_of(trainer.accelerator)) is not None:
            current.finish()
        load_best()

    trainer._load_best_model = finish_and_load  # type: ignore[method-assign]


def _with_shared_weights(trainer: Trainer, original: Callable[..., Any], *, validates: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def with_shared_weights(*args: Any, **kwargs: Any) -> Any:
        binding = binding_of(trainer.accelerator)
        with contextlib.nullcontext() if binding is None else binding.shared_weights(validates=validates):
            return original(*args, **kwargs)

    return with_shared_weights
