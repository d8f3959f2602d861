"""What would be compressed: the script runs in one process until it prepares its model, and ends there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import wrapt
from accelerate import Accelerator
from torch import nn

from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.control.levels import labels
from lowbit_strategy.launch.dry_run_report import Planned, plan
from lowbit_strategy.methods._base.compressor import Compressor


class DryRun:
    """Ends the script with a report when it prepares its first model that is to be trained."""

    def __init__(self, plugin: LowBitPlugin, planned: Planned) -> None:
        self.plugin = plugin
        self.planned = planned

    def install(self) -> None:
        """Once per process, before the script runs."""
        wrapt.wrap_function_wrapper(Accelerator, "prepare", self._prepare)

    def _prepare(self, wrapped: Callable[..., Any], instance: Accelerator, args: Any, kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module) and any(param.requires_grad for param in model.parameters()):
                self._report(model, instance.device)
                raise SystemExit(0)
        return wrapped(*args, **kwargs)

    def _report(self, model: nn.Module, device: torch.device) -> None:
        print(f"dry run, nothing is trained: {type(model).__name__}")
        controller = self.plugin.controller
        levels = controller.levels if controller is not None else ()
        if not levels:
            print(self._plan(model, self.plugin.compressor, device), flush=True)
        for at, (level, label) in enumerate(zip(levels, labels(levels), strict=True)):
            print(f"level {at} of {type(controller).__name__}, {label}, if everything has it:")
            print(self._plan(model, level, device), flush=True)

    def _plan(self, model: nn.Module, compressor: Compressor, device: torch.device) -> str:
        report = plan(model, compressor, self.planned, device=device, options=self.plugin.sync_options())
        return report.render()

    def finish(self) -> None:
        """Raises:
        SystemExit: The script ended without preparing a model.
        """
        print("lowbit: the script ended without preparing a model: there is nothing to report", file=sys.stderr)
        raise SystemExit(1)
