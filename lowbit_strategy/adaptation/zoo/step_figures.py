"""Takes the measurements that a probe requests in one step: levels tried on its gradients, both hops' error, its
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.adaptation.rehearsal import SingleRankBucket
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import Controller, EndToEnd, Energy, Probe
from lowbit_strategy.engine.bucket import Bucket, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.telemetry.measure import StepMeasure, energies

STATE_KEY = "last step"
_WARM_ROUNDS = 3  # a method with a warm start (PowerSGD) is judged after several rounds on the same tensor


class StepFigures(BucketObserver, StepListener):
    """This rank's measurements of the last step that counted. Ranks add them up when the next step begins, even after a
    resume.

    Args:
        sync: The engine.
        controller: The controller that requests them.
        timer: Returns the time in seconds.
    """

    def __init__(self, sync: GradientSync, controller: Controller, timer: Callable[[], float]) -> None:
        self._probe = Probe()  # of the step that begins; until then, of the last step
        self._sync, self._controller, self._timer = sync, controller, timer
        self._last_end: float | None = None
        self.forget()
        sync.save_per_rank(STATE_KEY, self)
        sync.listeners.add(self, StepPhase.DECIDE)

    def ask(self, probe: Probe) -> None:
        """Measure what `probe` requests in the step that begins."""
        self._probe = probe

    def forget(self) -> None:
        """Forget all measurements."""
        self._names: list[str] | None = None  # parameters that the last step measured; None: there is no such step
        self._seconds: float | None = None  # that step's time on this rank; None: no step before it
        self._last = StepMeasure(self._sync)

    # -- the step -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> BucketObserver | None:
        """Called by the engine, after the controller has decided."""
        self._measure = StepMeasure(self._sync)
        return self if self._probe.levels or self._probe.end_to_end else None

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        if self._probe.levels:
            self._try_levels(bucket, x, out)
        if self._probe.end_to_end:
            stages = self._measure.compare([each.within(x, out) for each in bucket.params], bucket.context.comm, stages)
        yield from stages

    def _try_levels(self, bucket: Bucket, x: Tensor, out: Tensor) -> None:
        sync = self._sync
        values = {}
        for param in bucket.params:
            residual = bucket.residual(param)
            self._measure.add_residual(param.name, residual)
            values[param.name] = bucket.compensated(param, x, out, residual)
        for level in self._probe.levels:
            configuration = self._controller.levels[level].phase(sync.step_index)
            self._measure.rows[level] |= try_level(configuration, values, sync.specs, sync.step_context().seed)

    def end_step(self, *, counted: bool) -> None:
        now = self._timer()
        if counted:
            self._names, self._last = list(self._sync.specs), self._measure
            self._seconds = None if self._last_end is None else now - self._last_end
        self._last_end = now

    def read(self) -> dict[str, Any]:
        """Telemetry of the last step, summed over ranks. Called when the next one begins."""
        probe, names, measure, seconds = self._probe, self._names, self._last, self._seconds
        self.forget()
        has_time = probe.seconds and seconds is not None
        shown: dict[str, Any] = {}
        if names is None or not (probe.levels or probe.end_to_end or has_time):
            return shown
        widths: dict[Any, int] = {**dict.fromkeys(probe.levels, 3), "end_to_end": 2, "residual": 1}
        sums, (mean_seconds,) = measure.summed(widths, [seconds or 0.0], names=names)
        squares = {figure: rows / (self._sync.loss_scale or 1.0) ** 2 for figure, rows in sums.items()}
        if has_time:
            shown["step_seconds"] = mean_seconds
        if not all(bool(rows.isfinite().all()) for rows in squares.values()):  # an overflow tells nothing
            return shown
        if probe.end_to_end:
            end_to_end = itertools.starmap(EndToEnd, squares["end_to_end"].tolist())
            shown["end_to_end"] = dict(zip(names, end_to_end, strict=True))
        if probe.levels:
            shown["energy"] = {
                level: dict(zip(names, itertools.starmap(Energy, squares[level].tolist()), strict=True))
                for level in probe.levels
            }
            shown["residual_norm"] = dict(zip(names, squares["residual"][:, 0].sqrt().tolist(), strict=True))
        return shown

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        rows = {figure: dict(each) for figure, each in self._last.rows.items()}
        return {"names": self._names, "seconds": self._seconds, "rows": rows}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """Load the states. If the layout has changed, the first rank takes all ranks' measurements."""
        self.forget()
        rest = iter(states)
        mine = next(rest)
        self._names, self._seconds = mine["names"], mine["seconds"]
        if self._names is None or not (own or self._sync.ranks.rank == 0):
            return
        for each in [mine] if own else rest:
            for figure, rows in each["rows"].items():
                self._add(figure, rows)

    def _add(self, figure: Hashable, rows: Mapping[str, Tensor]) -> None:
        own, device = self._last.rows[figure], self._sync.device
        for name, row in rows.items():
            own[name] = row.to(device, copy=True) if name not in own else own[name] + row.to(device)


def try_level(
    level: Compressor, values: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], seed: int
) -> dict[str, Tensor]:
    """The `energies` of each tensor as sent by `level`, with new state, in a world of one rank."""
    chosen = [specs[name] for name in values if specs[name].numel]
    if not chosen:
        return {}
    x = torch.cat([values[spec.name] for spec in chosen])
    bucket = SingleRankBucket(level, chosen, x.device, seed=seed)
    out = torch.empty_like(x)
    for _ in range(_WARM_ROUNDS if _starts_warm(bucket.sync) else 1):
        _forget_residuals_(bucket.sync)
        bucket.reduce(x.clone(), out)
    pairs = zip(chosen, out.split([spec.numel for spec in chosen]), strict=True)
    return {spec.name: energies(values[spec.name], sent) for spec, sent in pairs}


def _starts_warm(sync: GradientSync) -> bool:
    """Whether a `Reducer` keeps more state than residuals."""
    keys = [key for name in sync.specs for key in sync.state.tensors(name)]
    return any("residual" not in key and "." not in key for key in keys)


def _forget_residuals_(sync: GradientSync) -> None:
    for name in sync.specs:
        for key, tensor in sync.state.tensors(name).items():
            if "residual" in key:
                tensor.zero_()
