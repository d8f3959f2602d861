"""The `lowbit_config` section in the environment, attached to every `Accelerator` that is made in this process.

What is slow is imported when there is a section and something is made: Accelerate's own imports wait for this module.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import wrapt

from lowbit_strategy.autoload import VARIABLE

if TYPE_CHECKING:
    from accelerate import Accelerator

_OTHER_WAYS = tuple(  # of training compressed
    f"lowbit_strategy.{name}"
    for name in ("lightning", "pytorch_lightning", "fabric", "lightning_fabric", "custom_loop")
)
_log = logging.getLogger("lowbit_strategy")
_accelerators: list[Accelerator] = []  # that have a section's plugin, or had it


def serve_accelerators(module: Any) -> None:
    """`module` is ``accelerate.accelerator``."""
    wrapt.wrap_function_wrapper(module, "Accelerator.__init__", _accelerator_made)


def serve_trainers(module: Any) -> None:
    """`module` is ``transformers.trainer``. The Trainer has checkpoints of its own: residuals must go along."""
    wrapt.wrap_function_wrapper(module, "Trainer.__init__", _trainer_made)


@functools.cache  # once
def watch_optimizers(module: Any) -> None:
    """`module` is ``torch.optim.optimizer``, in a process that has a section: training must not go past it."""
    check_once = functools.cache(_check_training)
    module.register_optimizer_step_pre_hook(lambda *_: check_once())


def _accelerator_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if not (source := os.environ.get(VARIABLE)):
        return
    from lowbit_strategy.accelerate.binding import Binding

    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if not _accelerators:
        atexit.register(_leave)
    _accelerators.append(instance)
    Binding(_plugin(source), instance, fsdp_plugin=given.get("fsdp_plugin"), of_section=True)


@functools.cache
def _plugin(source: str) -> Any:
    from lowbit_strategy.config.section import plugin_from_section, read_section

    return plugin_from_section(read_section(source))


def _trainer_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if os.environ.get(VARIABLE):
        from lowbit_strategy.transformers.binding import bind_checkpoints

        bind_checkpoints(instance)


def _check_training() -> None:
    """Raises:
    RuntimeError: Training starts, and nothing of it would be compressed.
    """
    if not os.environ.get(VARIABLE):
        return  # a dry run
    if not _accelerators:
        if any(name in sys.modules for name in _OTHER_WAYS):
            return
        raise RuntimeError(
            "the script trains without an Accelerator, so nothing of it would be compressed: make one,"
            " accelerator = Accelerator(), and prepare model and optimizer with it (the Hugging Face Trainer does)"
        )
    from lowbit_strategy.accelerate.binding import binding_of

    bindings = [binding for each in _accelerators if (binding := binding_of(each)) is not None]
    distributed = any(each.num_processes > 1 for each in _accelerators)
    if distributed and not any(binding.sessions for binding in bindings):
        _log.warning(
            "the script steps an optimizer before any model has gone through accelerator.prepare: what is trained"
            " there is not compressed"
        )


def _leave() -> None:
    """For scripts that do not: gloo aborts now and then in a process that ends with its groups open."""
    import torch.distributed as dist

    if dist.is_initialized() and not hasattr(sys, "last_value"):  # after an exception others may still be waiting
        dist.destroy_process_group()
