"""The synchronization of a fragment: its header, its message in flight, and who brings it to the other ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending, wait_for_all
from lowbit_strategy.engine.bucket import BucketSchedule, Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.plan.rounds import NUM_FACTS
from lowbit_strategy.rounds.fragment import Fragment

_log = logging.getLogger("lowbit_strategy")


class FragmentSyncHeader:
    """Summed over ranks: ``[done?, asks?, steps, loss, ||s||^2, finite? of each rank, s, changes of buffers]``.

    Reading a property waits for the device.

    Args:
        flat: float32; an all-reduce may be in flight on it.
        world_size: Of the ranks that synchronize.
        sample_numel: Elements of the sample ``s`` of the pseudo-gradient.
    """

    def __init__(self, flat: Tensor, world_size: int, sample_numel: int) -> None:
        self.flat = flat
        self.world_size = world_size
        self._sizes = (NUM_FACTS, world_size, sample_numel, flat.numel() - NUM_FACTS - world_size - sample_numel)

    @classmethod
    def of(
        cls,
        sync: GradientSync,
        sample: Tensor,
        changes: Sequence[Tensor],
        *,
        done: bool,
        asks: bool,
        loss: Tensor | None,
        finite: Tensor,
    ) -> FragmentSyncHeader:
        """This rank's.

        Args:
            sync: Its engine, which counts its steps.
            sample: Of its pseudo-gradient; zeros if the rank is left out.
            changes: Of its buffers; likewise.
            done: It has no more steps.
            asks: All ranks are to do something together afterwards.
            loss: Mean of its losses since the last synchronization; None: unknown.
            finite: 1 or 0; 0 leaves the rank out.
        """
        peers = sync.ranks.peers
        facts = torch.zeros(NUM_FACTS + peers.world_size, device=sample.device)
        facts[0], facts[1], facts[2] = float(done), float(asks), float(sync.step_index)
        facts[3] = torch.nan if loss is None else loss
        facts[4] = torch.dot(sample, sample)
        facts[NUM_FACTS + peers.rank] = finite
        return cls(torch.cat([facts, sample, *changes]), peers.world_size, sample.numel())

    @property
    def all_done(self) -> bool:
        """Whether all ranks have stopped training."""
        return int(self.flat[0]) == self.world_size

    @property
    def asked(self) -> bool:
        """Whether any rank has asked."""
        return bool(self.flat[1])

    @property
    def steps(self) -> float:
        """Optimizer steps that a rank has completed on average."""
        return float(self.flat[2]) / self.world_size

    @property
    def loss(self) -> float | None:
        """The mean of all ranks'; None if a rank does not know its own, or it is not finite."""
        loss = float(self.flat[3]) / self.world_size
        return loss if math.isfinite(loss) else None

    @property
    def left_out(self) -> list[int]:
        """Ranks whose weights were not finite: they sent zeros."""
        finite_W = self.flat.split(self._sizes)[1]
        return [rank for rank, finite in enumerate(finite_W.tolist()) if not finite]

    def means(self, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``||s||^2``, of ``s`` and of the changes of buffers, over ranks whose weights sum to `share`."""
        facts, _, sample, changes = (self.flat / (share or 1.0)).split(self._sizes)
        return facts[4], sample, changes

    def state_dict(self) -> dict[str, Any]:
        return {"flat": self.flat, "world_size": self.world_size, "sample_numel": self._sizes[2]}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> FragmentSyncHeader:
        return cls(state["flat"].to(device), state["world_size"], state["sample_numel"])


def warn_of(left_out: Sequence[int], sync: GradientSync, *, all_of_them: bool) -> None:
    """Log, on one rank, that these ranks' weights were not finite."""
    if sync.ranks.rank:
        return
    which = "rank" if sync.ranks.intra_node is None else "replica"
    names = ", ".join(f"{which} {rank}" for rank in left_out)
    then = "the anchors stay as they are" if all_of_them else "the others go on without them"
    _log.warning(
        "weights that are not finite at optimizer step %d, on %s: %s, and they start again from the anchors, with a"
        " fresh optimizer state",
        sync.step_index,
        names,
        then,
    )


@dataclass(slots=True)
class InFlight:
    """A fragment in flight.

    Args:
        fragment: Its index.
        x: The pseudo-gradient; once it has arrived, the mean.
        header: Travels before it.
        arrivals: Of the header and of the buckets.
        delay: Optimizer steps after which it is applied.
        age: Optimizer steps since it was sent.
        weights: Each rank's weight, 1 on average; empty: all 1.
    """

    fragment: int
    x: Tensor
    header: FragmentSyncHeader
    arrivals: Sequence[Pending]
    delay: int
    age: int = 0
    weights: tuple[float, ...] = ()

    def share_of(self, ranks: Sequence[int]) -> float:
        """The sum of these ranks' weights."""
        return sum(self.weights[rank] if self.weights else 1.0 for rank in ranks)

    def wait(self) -> None:
        """Until all of it has arrived."""
        wait_for_all(self.arrivals)

    def state_dict(self, fragments: Sequence[Fragment]) -> dict[str, Any]:
        """After `wait`."""
        means = fragments[self.fragment].views(self.x)
        return {"means": means, "header": self.header.state_dict(), "delay": self.delay, "age": self.age}

    @classmethod
    def from_state(
        cls, saved: Mapping[str, Any] | None, fragments: Sequence[Fragment], device: torch.device
    ) -> InFlight | None:
        """None if nothing was in flight, or the fragments have other parameters now."""
        if saved is None:
            return None
        for at, fragment in enumerate(fragments):
            if fragment.anchors.keys() == saved["means"].keys():
                x_N = torch.empty(fragment.numel, dtype=torch.float32, device=device)
                for name, view in fragment.views(x_N).items():
                    view.copy_(saved["means"][name])
                header = FragmentSyncHeader.from_state(saved["header"], device)
                return cls(at, x_N, header, (), saved["delay"], saved["age"])
        return None


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A fragment that this replica has received completely, without knowing whether all have.

    Args:
        in_flight: The fragment.
        history: What the history becomes if it is committed.
        before: Next fragment, steps since the last one and length of the round, to roll back to.
        ends: All members have stopped training.
        done: This replica trains no more.
    """

    in_flight: InFlight
    history: int
    before: tuple[int, int, int]
    ends: bool
    done: bool


class AsyncReducer(Protocol):
    """Reduces while its caller continues."""

    def submit(self, *buckets: Stages, result: Tensor, last: bool) -> Pending: ...


class BlockingReducer:
    """All results have arrived when `submit` of the last one returns."""

    def __init__(self) -> None:
        self._schedule = BucketSchedule()

    def submit(self, *buckets: Stages, result: Tensor, last: bool) -> Pending:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[result.device] if result.is_cuda else None)
        try:
            self._schedule.start(buckets, result, future, last=last)
        except Exception as error:
            self._schedule.fail(error)
            raise
        return future


class RoundLosses:
    """This rank's losses since its last synchronization, and the ranks' mean at the first one and the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """A new run."""
        self._own: list[Tensor] = []
        self._first: float | None = None
        self._last: float | None = None

    def observe(self, loss: Tensor | float) -> None:
        """Of a batch. Does not wait for the device."""
        self._own.append(torch.as_tensor(loss, device=self._device).detach().float().mean())

    def take(self) -> Tensor | None:
        """This rank's mean since the last call; None: unknown."""
        own, self._own = self._own, []
        return torch.stack(own).mean() if own else None

    def arrived(self, loss: float | None) -> None:
        """The mean over all ranks; None: unknown."""
        if loss is not None:
            self._first, self._last = loss if self._first is None else self._first, loss

    @property
    def progress(self) -> float | None:
        """The last mean over the first one; None: unknown."""
        return None if not self._first or self._last is None else self._last / self._first

    def state_dict(self) -> dict[str, Any]:
        return {"own": list(self._own), "means": [self._first, self._last]}

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        """`own`: it was saved by this rank."""
        self._first, self._last = state["means"]
        self._own = [each.to(self._device) for each in state["own"]] if own else []
