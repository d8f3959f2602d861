"""What would be compressed: the script runs in one process until it prepares its model, and ends there.

Where its steps are to be predicted too and how long it computes is not given, it ends after a few steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import wrapt
from accelerate import Accelerator
from torch import nn

from lowbit_strategy.accelerate.plugin import LowBitPlugin
from lowbit_strategy.advisor import units
from lowbit_strategy.control.levels import labels
from lowbit_strategy.launch.dry_run_report import Planned, plan
from lowbit_strategy.launch.linked import Linked, time_steps
from lowbit_strategy.methods._base.compressor import Compressor


class DryRun:
    """Ends the script with a report when it prepares its first model that is to be trained.

    Args:
        plugin: Configuration.
        planned: The run.
        linked: The links that its steps are to be predicted for; None: they are not.
    """

    def __init__(self, plugin: LowBitPlugin, planned: Planned, linked: Linked | None = None) -> None:
        self.plugin = plugin
        self.planned = planned
        self.linked = linked
        self._times = False  # steps, to the end of which the script runs

    def install(self) -> None:
        """Once per process, before the script runs."""
        wrapt.wrap_function_wrapper(Accelerator, "prepare", self._prepare)

    def _prepare(self, wrapped: Callable[..., Any], instance: Accelerator, args: Any, kwargs: Any) -> Any:
        for model in args:
            if self._times or not isinstance(model, nn.Module):
                continue
            if any(param.requires_grad for param in model.parameters()):
                linked, device = self.linked, instance.device
                if linked is None or linked.compute:
                    self._report(model, device, units.duration(linked.compute) if linked is not None else None)
                self._times = True
                time_steps(partial(self._report, model, device), device)
        return wrapped(*args, **kwargs)

    def _report(
        self, model: nn.Module, device: torch.device, compute_s: float | None, optimizer_s: float = 0.0
    ) -> NoReturn:
        """Raises:
        SystemExit: With status 0, after the report.
        """
        timed = " but a few steps in this process" if self._times else ""
        print(f"dry run, nothing is trained{timed}: {type(model).__name__}")
        controller = self.plugin.controller
        levels = controller.levels if controller is not None else ()
        if not levels:
            print(self._plan(model, self.plugin.compressor, device, compute_s, optimizer_s), flush=True)
        for at, (level, label) in enumerate(zip(levels, labels(levels), strict=True)):
            print(f"level {at} of {type(controller).__name__}, {label}, if everything has it:")
            print(self._plan(model, level, device, compute_s, optimizer_s), flush=True)
        raise SystemExit(0)

    def _plan(
        self,
        model: nn.Module,
        compressor: Compressor,
        device: torch.device,
        compute_s: float | None,
        optimizer_s: float,
    ) -> str:
        options = self.plugin.sync_options()
        linked = self.linked
        far = linked is not None and linked.is_far(device)
        report = plan(model, compressor, self.planned, device=device, options=options, far=far)
        if linked is None or compute_s is None:
            return report.render()
        cluster = linked.cluster(compressor, device)
        return f"{report.render()}\n{linked.predict(report.plan, cluster, compute_s, optimizer_s)}"

    def finish(self) -> None:
        """Raises:
        SystemExit: The script ended without preparing a model, or before enough of its steps were timed.
        """
        if self._times:
            text = "the script ended before its steps could be timed: give --compute"
        else:
            text = "the script ended without preparing a model: there is nothing to report"
        print(f"lowbit: {text}", file=sys.stderr)
        raise SystemExit(1)
