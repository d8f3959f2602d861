"""Observation: measures in chosen steps how compression changes gradients; other steps cost nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending, is_far
from lowbit_strategy.control.bounds import Reading
from lowbit_strategy.control.grouping import GroupBy, grouped
from lowbit_strategy.engine.bucket import Bucket, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.ranks.topology import Topology
from lowbit_strategy.telemetry.instants import Instant, now, seconds_between
from lowbit_strategy.telemetry.measure import StepMeasure, energies

_WIDTHS = {"energies": 3, "residual": 1, "end_to_end": 2}  # row lengths by figure


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some parameters in one step, over all ranks, with h = gradient + residual:

    Args:
        numel: Elements.
        relative_error: ``||h - sent|| / ||h||`` of the uplink.
        end_to_end_error: ``||result - mean|| / ||mean||`` over both hops and all ranks, where mean is the true mean of
            the ranks' gradients; estimated from a sample. Feedback corrects it in later steps. None if replicas come
            and go, since all of them would have to measure the same steps.
        cosine: Cosine of the angle between h and what was sent.
        residual_norm: ``||residual||``.
        compensated_norm: ``||h||``.
        bits_per_element: Bits on the wire per element and hop; 32 for uncompressed float32.
        wire_nbytes: Bytes that a rank sends for them, computed by the methods, averaged over ranks.
        method: The method that compresses them.
        compressed: Whether any of them is compressed. If so, errors and norms cover only those; elements and bytes
            cover all.
    """

    numel: int
    relative_error: float
    end_to_end_error: float | None
    cosine: float
    residual_norm: float
    compensated_norm: float
    bits_per_element: float
    wire_nbytes: float
    method: str
    compressed: bool

    @property
    def reading(self) -> Reading:
        """The figures that bounds apply to."""
        ratio = self.residual_norm / self.compensated_norm if self.compensated_norm > 0 else 0.0
        return Reading(self.relative_error, ratio, self.end_to_end_error)


@dataclass(frozen=True, slots=True)
class Observation:
    """One observed step.

    Args:
        step: Optimizer steps completed before it.
        total: Figures of all parameters.
        groups: Figures by group name.
        sent_nbytes: Gradient bytes that a rank sent in the whole step, counted, averaged over ranks.
        between_nbytes: The bytes that left the node; all of them if it is unknown which ranks share a node.
        inside_nbytes: Gradient bytes that stayed inside the node, including, with two levels, those of exact sums.
            Counted, averaged over ranks.
        weights_nbytes: Bytes that this rank sent for weights in the previous step, counted; 0 under DDP.
        dense_nbytes: Bytes that an uncompressed float32 ring would have sent.
        codec_ms: Time in methods (encode, decode, select), averaged over ranks.
        comm_ms: Time spent waiting for other ranks' bytes, including what overlaps with backward.
        step_ms: Time from the end of the previous step to the end of this one; None for a first step. In rounds, from
            synchronization to synchronization.
        nonfinite: Parameters whose gradient was not finite.
        drift: Rounds: how far ranks had drifted apart, as the root mean square of their distances from the mean, in
            units of the mean movement; None if every step is synchronized.
        stride: Optimizer steps since the previous reduction; 1 if every step is synchronized. `sent_nbytes` and the
            others cover all of them together.
    """

    step: int
    total: Figures
    groups: dict[str, Figures]
    sent_nbytes: float
    between_nbytes: float
    inside_nbytes: float
    weights_nbytes: float
    dense_nbytes: float
    codec_ms: float
    comm_ms: float
    step_ms: float | None
    nonfinite: tuple[str, ...]
    drift: float | None = None
    stride: int = 1


class _Timed(NamedTuple):
    """Wraps a handle, and notes when waiting for it began and ended."""

    pending: Pending
    device: torch.device
    waits: list[tuple[Instant, Instant]]

    @property
    def is_far(self) -> bool:
        return is_far(self.pending)

    def wait(self) -> object:
        began = now(self.device)
        result = self.pending.wait()
        self.waits.append((began, now(self.device)))
        return result


def _seconds(stretches: Sequence[tuple[Instant, Instant]]) -> float:
    return sum(seconds_between(began, ended) for began, ended in stretches)


class Observer(BucketObserver, StepListener):
    """Observes the steps that `wants` names and keeps the last `Observation`.

    Args:
        sync: The engine to watch.
        wants: Whether to observe the step with this number, the same on all ranks.
        group_by: How parameters are grouped, see `group_of`.

    Attributes:
        last: The last observation, available on every rank after each observed step.
        own_sent_nbytes: Bytes that this rank sent in the last observed step, except for observing.
    """

    traces = True

    def __init__(
        self,
        sync: GradientSync,
        wants: Callable[[int], bool],
        *,
        group_by: GroupBy = "kind",
    ) -> None:
        self.sync = sync
        self.wants = wants
        self.group_by = group_by
        self.last: Observation | None = None
        self.own_sent_nbytes = 0
        self._observing = False
        self._last_end: float | None = None
        sync.listeners.add(self, StepPhase.OBSERVE)

    def begin_step(self) -> Observer | None:
        self._observing = self.wants(self.sync.step_index)
        if not self._observing:
            return None
        self._step = self.sync.step_index
        self._measure = StepMeasure(self.sync)
        self._codes: list[tuple[Instant, Instant]] = []  # start and end of each time this rank coded
        self._waits: list[tuple[Instant, Instant]] = []
        self._sent_before = {ranks.peers: ranks.peers.sent_nbytes for ranks in self.sync.all_ranks}
        self._inside_before = self._inside_nbytes()
        return self

    def _inside_nbytes(self) -> int:
        inside = [ranks.intra_node for ranks in self.sync.all_ranks]
        return sum(comm.sent_nbytes for comm in inside if comm is not None)

    @property
    def sampling_nbytes(self) -> int:
        """Bytes sent for observing in the last observed step."""
        return self._measure.sampling_nbytes.total()

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        stages = self._timed(stages)
        if not self.sync.ranks.comes_and_goes:  # a replica observes alone
            views = [param.within(x, out) for param in bucket.params]
            stages = self._measure.compare(views, bucket.context.comm, stages)
        yield from stages

    def _timed(self, stages: Stages) -> Stages:
        device = self.sync.device
        while True:
            began = now(device)
            try:
                pending = next(stages)
            except StopIteration:
                return
            finally:
                self._codes.append((began, now(device)))
            yield None if pending is None else _Timed(pending, device, self._waits)

    def trace_residual(self, name: str, residual: Tensor | None) -> None:
        self._measure.add_residual(name, residual)

    def trace(self, name: str, compensated: Tensor, sent: Tensor) -> None:
        self._measure.rows["energies"][name] = energies(compensated, sent)

    def end_step(self, *, counted: bool) -> None:
        end = time.perf_counter()
        if self._observing:
            sampling = self._measure.sampling_nbytes
            self._sent = {comm: comm.sent_nbytes - was - sampling[comm] for comm, was in self._sent_before.items()}
            self.own_sent_nbytes = sum(self._sent.values())
            if counted:
                seconds = None if self._last_end is None else end - self._last_end
                self.sync.listeners.when_all_have_ended(lambda: self._sum_up(seconds))
        self._last_end = end

    def _sum_up(self, seconds: float | None) -> None:
        sync, names = self.sync, list(self.sync.specs)
        own, left = self.own_sent_nbytes, sum(comm.between_nodes(sent) for comm, sent in self._sent.items())
        facts = [_seconds(self._codes), _seconds(self._waits), own, seconds or 0.0, left]
        facts += [own - left + self._inside_nbytes() - self._inside_before]
        facts += [sync.state.sent_nbytes(name) for name in names]
        squares, means = self._measure.summed(_WIDTHS, facts)
        codec, waiting, sent, step, between, inside, *nbytes = means
        scaled = torch.cat([*squares.values()], dim=1) / (sync.loss_scale or 1.0) ** 2
        rows = torch.cat([scaled, torch.tensor(nbytes, dtype=torch.float64)[:, None]], dim=1)
        sums = dict(zip(names, rows.tolist(), strict=True))
        groups = grouped(names, self.group_by)
        self.last = Observation(
            step=self._step,
            total=self._figures(names, sums),
            groups={group: self._figures(members, sums) for group, members in groups.items()},
            sent_nbytes=sent,
            between_nbytes=between,
            inside_nbytes=inside,
            weights_nbytes=0.0 if sync.weights is None else float(sync.weights.step_nbytes),
            dense_nbytes=4 * self._traffic(names),
            codec_ms=1000 * codec,
            comm_ms=1000 * waiting,
            step_ms=1000 * step if seconds is not None else None,
            nonfinite=tuple(name for name in names if not all(map(math.isfinite, sums[name]))),
            drift=None if sync.rounds is None else sync.rounds.drift,
            stride=sync.steps_per_reduction,
        )

    def _traffic(self, names: Sequence[str]) -> float:
        """Number of elements of these parameters that a rank sends in an uncompressed ring, on average."""
        sync, numels = self.sync, Counter[Comm]()
        for name in names:
            numels[sync.state.ranks_of(name).peers] += sync.specs[name].whole.numel
        hops = {ranks.peers: self._hops(ranks.topology) for ranks in sync.all_ranks}
        return sum(hops[peers] * numel for peers, numel in numels.items())

    def _hops(self, ranks: Topology) -> float:
        """How often a rank sends an element in such a ring."""
        return (1 if self.sync.sharded else 2) * (ranks.num_peers - 1) / ranks.num_peers / ranks.num_parts

    def _figures(self, names: Sequence[str], sums: Mapping[str, Sequence[float]]) -> Figures:
        sync = self.sync
        compressed = [name for name in names if sync.state.assignments[name].kind != "exempt"]
        columns = zip(*(sums[name] for name in compressed or names), strict=True)
        h, sent, error, residual, end_to_end, mean, _ = map(sum, columns)
        product = (h + sent - error) / 2
        numel = sum(sync.specs[name].whole.numel for name in names)
        nbytes = sum(sums[name][-1] for name in names)
        traffic = self._traffic(names)
        methods = dict.fromkeys(sync.state.assignments[name].method.label for name in names)
        return Figures(
            numel=numel,
            relative_error=_ratio(error, h),
            end_to_end_error=None if sync.ranks.comes_and_goes else _ratio(end_to_end, mean),
            cosine=product / math.sqrt(h * sent) if h * sent > 0 else 1.0 + 0.0 * h,
            residual_norm=math.sqrt(residual),
            compensated_norm=math.sqrt(h),
            bits_per_element=8 * nbytes / traffic if traffic else 0.0,
            wire_nbytes=nbytes,
            method=", ".join(methods),
            compressed=bool(compressed),
        )


def _ratio(square: float, of: float) -> float:
    """The ratio of two norms, given their squares: 0 if the second is 0, and NaN stays NaN."""
    return math.sqrt(square / of) if of > 0 else 0.0 * of
