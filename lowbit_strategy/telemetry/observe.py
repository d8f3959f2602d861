"""Observation: what compression does to the gradients, measured on chosen steps and not at all on the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.control.groups import GroupBy, check_group_by, grouped
from lowbit_strategy.engine.bucket import Bucket
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.base import CodecPair, Reducer
from lowbit_strategy.telemetry.measure import compensated, energies, sum_over_ranks, table
from lowbit_strategy.telemetry.startup_report import method_label

_ENERGIES = 5  # said, sent, error, said . sent, residual: squares, summed over ranks


@dataclass(frozen=True, slots=True)
class Figures:
    """Some parameters in one step, over all ranks. With h = gradient + residual:

    Args:
        numel: Elements.
        relative_error: ||h - sent|| / ||h||.
        cosine: Of the angle between h and what was sent.
        gain: ||sent||^2 / ||h||^2.
        residual_norm: ||residual|| in h.
        gradient_norm: ||h||.
        bits_per_element: Bits on the wire for one element and hop; an uncompressed float32 has 32.
        wire_nbytes: Bytes a rank sends for them, by the methods' own account.
        method: What compresses them.
        compressed: Whether any of them is not exempt.
    """

    numel: int
    relative_error: float
    cosine: float
    sent_energy_ratio: float
    residual_norm: float
    gradient_norm: float
    bits_per_element: float
    wire_nbytes: float
    method: str
    compressed: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """One observed step.

    Args:
        step: Optimizer steps completed before it.
        total: All parameters.
        groups: By group name.
        sent_nbytes: Bytes a rank put on the wire in the whole step, counted, mean over ranks.
        dense_nbytes: What an uncompressed float32 ring would have sent.
        codec_ms: Time in methods (encode, decode, select), mean over ranks.
        comm_ms: Time in waiting for other ranks' bytes; what overlaps with backward is in it too.
        step_ms: From the end of the step before to the end of this one; None for a first step.
        untold: Parameters whose method does not say what it sent; they are in the bytes only.
    """

    step: int
    total: Figures
    groups: dict[str, Figures]
    sent_nbytes: float
    dense_nbytes: float
    codec_ms: float
    comm_ms: float
    step_ms: float | None
    untold: tuple[str, ...]


class _Stopwatch:
    """Adds up stretches of time: of this thread on CPU, of the current stream on CUDA (read at the end, no waiting)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, key: str, started: Any) -> None:
        if self._cuda:
            self._events.append((key, started, self.start()))
        else:
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - started

    def read(self, key: str) -> float:
        for name, begin, end in self._events:
            end.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events = []
        return self.seconds.get(key, 0.0)


class _TimedPending(NamedTuple):
    pending: Pending
    stopwatch: _Stopwatch

    def wait(self) -> object:
        started = self.stopwatch.start()
        result = self.pending.wait()
        self.stopwatch.stop("comm", started)
        return result


class Observer:
    """Watches the steps that `wants` names and keeps the last `Observation`.

    Args:
        sync: Engine to watch.
        wants: Whether to observe the step with this number; the same on all ranks.
        group_by: How parameters are grouped, see `group_of`.
        on_observation: Called on every rank after each observed step.
    """

    def __init__(
        self,
        sync: GradientSync,
        wants: Callable[[int], bool],
        *,
        group_by: GroupBy = "kind",
        on_observation: Callable[[Observation], None] | None = None,
    ) -> None:
        check_group_by(group_by)
        self.sync = sync
        self.wants = wants
        self.group_by = group_by
        self.on_observation = on_observation
        self.last: Observation | None = None
        self.own_sent_nbytes = 0  # of the last observed step, this rank's alone
        self._watching = False
        self._last_end: float | None = None
        sync.listeners.append(self)

    def detach(self) -> None:
        self.sync.listeners.remove(self)

    def begin_step(self) -> None:
        self._watching = self.wants(self.sync.step_index)
        if not self._watching:
            return
        self._step = self.sync.step_index
        self._stopwatch = _Stopwatch(self.sync.device)
        self._rows: dict[str, Tensor] = {}
        self._waiting: dict[str, Tensor] = {}  # squares of residuals of whole-model methods' parameters
        self._sent_before = self.sync.comm.sent_nbytes
        self.sync.said = {}
        self.sync.bucket_observers.insert(0, self)  # innermost: what other taps do is none of the methods' time

    def observe(
        self, bucket: Bucket, x: Tensor, out: Tensor, stages: Iterator[Pending | None]
    ) -> Iterator[Pending | None]:
        sync = self.sync
        codecs = [slot for slot in bucket.slots if isinstance(sync.assignments[slot.name].method, CodecPair)]
        said = {slot.name: compensated(sync, bucket.view(slot, x, out)) for slot in codecs}
        others = [slot.name for slot in bucket.slots if slot.name not in said]
        for name in others:
            residual = sync.export_residual(name)
            self._waiting[name] = torch.zeros((), device=sync.device) if residual is None else residual.square().sum()
        yield from self._timed(stages)
        if bucket.exchange is not None:
            sent = torch.zeros_like(x, dtype=torch.float32)
            bucket.exchange.sent_(sent)
            for slot in codecs:
                values, residual_square = said[slot.name]
                heard = bucket.view(slot, sent, out).flat()
                self._rows[slot.name] = torch.cat([energies(values, heard), residual_square.view(1)])
        for name in others:
            method = sync.assignments[name].method
            if isinstance(method, Reducer) and not method.whole_model:
                self._listen(name)

    def _timed(self, stages: Iterator[Pending | None]) -> Iterator[Pending | None]:
        while True:
            started = self._stopwatch.start()
            try:
                pending = next(stages)
            except StopIteration:
                return
            finally:
                self._stopwatch.stop("codec", started)
            yield None if pending is None else _TimedPending(pending, self._stopwatch)

    def _listen(self, name: str) -> None:
        """What a reducer told of one parameter."""
        assert self.sync.said is not None
        view = self.sync.said.pop(name, None)
        if view is not None and view.compensated is not None and view.sent is not None:
            row = torch.cat([energies(view.compensated, view.sent), self._waiting.pop(name).view(1)])
            self._rows[name] = row

    def end_step(self, *, counted: bool) -> None:
        now = time.perf_counter()
        if self._watching:
            for name in list(self.sync.said or {}):
                self._listen(name)
            self.sync.said = None
            self.own_sent_nbytes = self.sync.comm.sent_nbytes - self._sent_before
            if counted:
                self.last = self._summarize(None if self._last_end is None else now - self._last_end)
                if self.on_observation is not None:
                    self.on_observation(self.last)
        self._last_end = now

    # -- summing up ---------------------------------------------------------------------------------------------

    def _summarize(self, seconds: float | None) -> Observation:
        sync, comm = self.sync, self.sync.comm
        names = list(sync.specs)
        rows = table(self._rows, names, _ENERGIES, sync.device)
        times = [self._stopwatch.read("codec"), self._stopwatch.read("comm"), self.own_sent_nbytes, seconds or 0.0, 0.0]
        last = torch.tensor([times], dtype=torch.float64, device=sync.device)
        total = sum_over_ranks(torch.cat([rows, last]), comm)
        codec, waiting, sent, step, _ = (total[-1] / comm.world_size).tolist()
        told = total[:-1] / (sync.loss_scale or 1.0) ** 2
        untold = tuple(name for name, row in zip(names, told, strict=True) if bool(row.isnan().any()))
        at = {name: place for place, name in enumerate(names)}
        return Observation(
            step=self._step,
            total=self._figures(names, told, at),
            groups={
                group: self._figures(members, told, at) for group, members in grouped(names, self.group_by).items()
            },
            sent_nbytes=sent,
            dense_nbytes=4 * self._hops() * sum(spec.numel for spec in sync.specs.values()),
            codec_ms=1000 * codec,
            comm_ms=1000 * waiting,
            step_ms=1000 * step if seconds is not None else None,
            untold=untold,
        )

    def _hops(self) -> float:
        """How often an element of an uncompressed ring leaves a rank, on average."""
        world_size = self.sync.comm.world_size
        return (1 if self.sync.scatter else 2) * (world_size - 1) / world_size

    def _figures(self, names: Sequence[str], rows: Tensor, at: dict[str, int]) -> Figures:
        sync = self.sync
        sums = [rows[at[name]] for name in names]
        told = [row for row in sums if not bool(row.isnan().any())]
        said, sent, error, product, residual = torch.stack(told).sum(dim=0).tolist() if told else [math.nan] * _ENERGIES
        numel = sum(sync.specs[name].numel for name in names)
        nbytes = sum(sync.sent_nbytes(name) for name in names)
        traffic = self._hops() * numel
        methods = dict.fromkeys(method_label(sync.assignments[name].method) for name in names)
        return Figures(
            numel=numel,
            relative_error=math.sqrt(error / said) if said > 0 else 0.0 * said,
            cosine=product / math.sqrt(said * sent) if said * sent > 0 else 1.0 + 0.0 * said,
            sent_energy_ratio=sent / said if said > 0 else 1.0 + 0.0 * said,
            residual_norm=math.sqrt(residual),
            gradient_norm=math.sqrt(said),
            bits_per_element=8 * nbytes / traffic if traffic else 0.0,
            wire_nbytes=nbytes,
            method=", ".join(methods),
            compressed=any(sync.assignments[name].kind != "exempt" for name in names),
        )
