"""Rescales residuals when the learning rate changes, so that they keep their effect on an optimizer step."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase

GRAIN = 1 / 16  # in powers of two: scales of int8 residuals are bfloat16, and would not see smaller changes


class FollowsRate(Part):
    """Whether residuals follow the learning rate."""

    def __init__(self, options: SyncOptions) -> None:
        self._follows = options.follows_rate

    def attach(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> None:
        if self._follows:
            FollowedRates(sync)


class FollowedRates(StepListener):
    """Error feedback as first published, where the residual is the learning rate times what has not been sent.

    A residual in units of the gradient is the same divided by the rate. So when the rate of a parameter goes from `a`
    to `b`, its residual is multiplied by ``a / b``:

    1. remember the learning rate that each parameter's residual belongs to, at first the rate of the first step
    2. when the rate differs from it by `GRAIN`, rescale the residual and remember the new rate
    3. a rate of zero changes nothing: the residual belongs to the last nonzero rate
    4. a parameter whose reduction is open waits for the next step
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync, self._state, self._transactions = sync, sync.state, sync.transactions
        self._rates: dict[str, float] = {}
        sync.listeners.add(self, StepPhase.RECORD)
        sync.save_with("rates", self)

    def begin_step(self) -> None:
        rates = self._sync.learning_rates.rates()  # includes parameters that are frozen or not synchronized
        for name in self._state.assignments:
            rate = rates.get(name, 0.0)
            if not rate > 0 or name in self._transactions.open:
                continue
            before = self._rates.setdefault(name, rate)
            if abs(math.log2(rate / before)) >= GRAIN:
                self._rescale_(name, before / rate)
                self._rates[name] = rate

    def _rescale_(self, name: str, factor: float) -> None:
        """Multiply one parameter's unsent residual, including leftovers and reductions set aside, by `factor`."""
        store = self._state.store(name)
        store.method.rescale_residual_(store.tensors(name), factor)
        self._state.carryover.rescale_(factor, [name])
        self._transactions.rescale_residual_(name, factor)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rates = dict(state["rates"])
