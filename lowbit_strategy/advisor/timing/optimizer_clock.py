"""How long optimizers take: the part of a step that begins when nothing travels any more."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowbit_strategy.advisor.timing.device_clock import finish

_clocks: weakref.WeakSet[OptimizerClock] = weakref.WeakSet()  # that run
_handles: list[Any] = []  # torch's hooks, once per process


class OptimizerClock:
    """Times the steps of all optimizers of ``torch.optim`` in this process as long as it lives.

    A step that is given a closure, as Lightning gives it forward and backward, counts from where that has returned.
    The device finishes its work before a step and after it. Steps that are compiled are not timed.

    Args:
        device: Of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._seconds = 0.0
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))
        _clocks.add(self)

    def take(self) -> float:
        """Seconds since the last call, or the beginning."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def begin(self) -> None:
        finish(self._device)
        self._began = time.perf_counter()

    def end(self) -> None:
        finish(self._device)
        self._seconds += time.perf_counter() - self._began


def _before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Begin, and once more when a closure has returned; `args` begin with the optimizer."""
    if torch.compiler.is_compiling():
        return None
    running = list(_clocks)
    for clock in running:
        clock.begin()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not running or not callable(closure):
        return None

    def timed(*values: Any) -> Any:
        loss = closure(*values)
        for clock in running:
            clock.begin()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": timed}
    return (args[0], timed, *args[2:]), kwargs  # its name may be another


def _after(*_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for clock in list(_clocks):
        clock.end()
