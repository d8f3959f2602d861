"""A plugin for scripts that know nothing of it: attached to every `Accelerator` that is made in this process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import wrapt
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowbit_strategy.accelerate.binding import Binding
from lowbit_strategy.accelerate.plugin import LowBitPlugin

_log = logging.getLogger("lowbit_strategy")


class AutoAttach:
    """Attaches `plugin` to every `Accelerator`, and refuses training that would go past it.

    Args:
        plugin: Configuration.
    """

    def __init__(self, plugin: LowBitPlugin) -> None:
        self.plugin = plugin
        self.bindings: list[Binding] = []

    def install(self) -> None:
        """Once per process, before the script runs."""
        wrapt.wrap_function_wrapper(Accelerator, "__init__", self._made)
        self._first_step = register_optimizer_step_pre_hook(self._before_first_step)

    def _made(self, wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        wrapped(*args, **kwargs)
        self.bindings.append(self.plugin.attach(instance, fsdp_plugin=given.get("fsdp_plugin")))

    def _before_first_step(self, *_: Any) -> None:
        """Raises:
        RuntimeError: Training starts, and nothing of it would be compressed.
        """
        self._first_step.remove()
        if not self.bindings:
            raise RuntimeError(
                "the script trains without an Accelerator, so nothing of it would be compressed: make one,"
                " accelerator = Accelerator(), and prepare model and optimizer with it (the Hugging Face Trainer does)"
            )
        distributed = any(binding.accelerator.num_processes > 1 for binding in self.bindings)
        if distributed and not any(binding.sessions for binding in self.bindings):
            raise RuntimeError(
                "the script steps an optimizer before any model has gone through accelerator.prepare: nothing would be"
                " compressed. Prepare model and optimizer first"
            )

    def finish(self) -> None:
        """The script is over."""
        if not self.bindings:
            _log.warning("lowbit_strategy: the script made no Accelerator: nothing was compressed")
