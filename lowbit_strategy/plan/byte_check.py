"""Checks that a step sends exactly the planned bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.engine.bucket import Bucket, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.engine.weight_sync import WeightSync
from lowbit_strategy.plan.gradients import ReductionPlan
from lowbit_strategy.plan.weight_bytes import module_weights
from lowbit_strategy.ranks.topology import Topology


class Promise(NamedTuple):
    """The bytes that a bucket will send.

    Args:
        nbytes: Number of bytes, exact if its methods are codecs.
        padding_nbytes: Padding that other methods may add: to 16 bytes, for each parameter on both hops.
        fixed: Whether the bytes do not depend on values.
    """

    nbytes: int
    padding_nbytes: int
    fixed: bool


@dataclass(slots=True)
class _Count:
    """The bytes that a bucket has sent."""

    bucket: Bucket
    nbytes: int = 0


class ByteCheck(BucketObserver, StepListener):
    """Counts the bytes that each bucket sends, and compares a step's sum with the buckets' plans.

    Sums are compared, since one bucket may send for all (`Bucket`). A step with methods whose bytes depend on values is
    not compared. Weights: `WeightCheck`.

    Args:
        sync: The engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._counts: list[_Count] = []
        self._promises: WeakKeyDictionary[Bucket, Promise] = WeakKeyDictionary()
        self._weights: WeightCheck | None = None
        sync.bucket_observers.append(self)
        sync.listeners.add(self, StepPhase.RECORD)

    def begin_step(self) -> None:
        """Called by the engine. Forget the counts of an earlier step whose gradients were discarded."""
        self._counts = []

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        """Called by the engine."""
        count = _Count(bucket)
        self._counts.append(count)
        return _counted(stages, count)

    def end_step(self, *, counted: bool) -> None:
        """Called by the engine.

        Raises:
            RuntimeError: The number of bytes sent differs from the plan.
        """
        promises = [self._promise(count.bucket) for count in self._counts]
        sent, promised = sum(count.nbytes for count in self._counts), sum(each.nbytes for each in promises)
        padding = sum(each.padding_nbytes for each in promises)
        self._counts = []
        if all(each.fixed for each in promises) and abs(sent - promised) > padding:
            raise RuntimeError(
                f"{sent} bytes of gradients were sent in this step, but {promised} and at most {padding} of padding"
                " were planned: a method counts its bytes wrongly, please report it"
            )
        if (weights := self._sync.weights) is not None:
            if self._weights is None or self._weights.weights is not weights:
                self._weights = WeightCheck(weights)
            self._weights.end_step()

    def _promise(self, bucket: Bucket) -> Promise:
        if bucket not in self._promises:
            self._promises[bucket] = promised(bucket)
        return self._promises[bucket]


def promised(bucket: Bucket) -> Promise:
    """The bytes that one bucket will send."""
    context, names = bucket.context, bucket.ordered_names
    reduction = ReductionPlan(context.methods, context.specs, Topology(context.comm.world_size))
    messages = reduction.messages(names, bucket.layout.num_marked)
    nbytes, fixed = sum(message.total_nbytes for message in messages), all(message.fixed for message in messages)
    return Promise(nbytes, reduction.padding_nbytes(names), fixed)


def _counted(stages: Stages, count: _Count) -> Iterator[Pending | None]:
    """Count the bytes that `stages` send, which happens only between two yields."""
    comm = count.bucket.context.comm
    while True:
        before = comm.sent_nbytes
        try:
            pending = next(stages)
        except StopIteration:
            return
        finally:
            count.nbytes += comm.sent_nbytes - before
        yield pending


class WeightCheck:
    """The same check for FSDP2's weights.

    Args:
        weights: The model's weights, which have not been gathered before.
    """

    def __init__(self, weights: WeightSync) -> None:
        self.weights = weights
        self._before = (0, 0, 0)  # counted, promised and maximum framing bytes before the step
        self._costs = {
            name: module_weights(weights.coding, layout, weights.modules[name].world_size)
            for name, layout in weights.layouts.items()
        }

    def end_step(self) -> None:
        """Raise a RuntimeError if the number of bytes sent differs from the promised number."""
        promised = framing = 0
        for name, costs in self._costs.items():
            gather = self.weights.modules[name]
            promised += (gather.num_sent - gather.num_exact) * costs.gather_nbytes
            promised += gather.num_exact * costs.exact_nbytes
            framing += gather.num_sent * costs.framing_nbytes
        now = (sum(comm.sent_nbytes for comm in self.weights.comms), promised, framing)
        sent, expected, most = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        if not 0 <= sent - expected <= most:
            raise RuntimeError(
                f"rank {self.weights.comms[0].rank} sent {sent} bytes for weights in this step, but {expected} and at"
                f" most {most} of framing were expected: this is a fault of lowbit_strategy, please report it"
            )
