"""The collectives that carry gradients, and the count of the bytes they put on the wire.

This is the only place that calls ``torch.distributed`` for gradients. Every method starts its collective and returns at
once; the caller waits on the returned handle (on CUDA, the current stream waits and not the host).
"""

from __future__ import annotations

import atexit
import copy
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy import leaves

T = TypeVar("T")

_GRACE_S = 0.05
# the latter is the name that torch 2.13 deprecates
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# gloo's threads need the GIL to release a collective that backward started (PyTorch 2.13). One that asks for it while
# the interpreter shuts down aborts the process, even though everything has been saved. Sleeping here lets them have it
# before.
atexit.register(time.sleep, _GRACE_S)


_LOST_RANKS = "lowbit_strategy.lost_ranks:naming_lost_ranks"


@functools.cache
def _explanation() -> Callable[[dist.ProcessGroup | None, str, str], AbstractContextManager[None]]:
    if leaves.is_present(_LOST_RANKS):
        found: Callable[..., AbstractContextManager[None]] = leaves.load(_LOST_RANKS, "naming lost ranks")
        return found
    return lambda *_: nullcontext()


def naming_lost_ranks(group: dist.ProcessGroup | None, what: str, place: str = "") -> AbstractContextManager[None]:
    """If the exchange `what` fails in this context, in the step `place`, name the ranks that did not take part. If
    `lost_ranks` is not installed, the transport's error is unchanged.
    """
    return _explanation()(group, what, place)


class Pending(Protocol):
    """A handle that a method yields while its bytes travel."""

    def wait(self) -> object: ...


def is_far(pending: Pending | None) -> bool:
    """Whether `pending` is a message from a far rank. Handles of a user's own methods need not say so."""
    return getattr(pending, "is_far", False)


def wait_for_all(stages: Iterable[Pending | None]) -> None:
    """Run all stages of a reduction and wait for each one. A stage of None has nothing in flight."""
    for pending in stages:
        if pending is not None:
            pending.wait()


class Comm(ABC):
    """The collectives among `world_size` ranks; this rank is `rank`.

    Attributes:
        group: The process group; None if there is none.
        sent_nbytes: Bytes that this rank has sent to other ranks so far, without messages to itself.
        num_near: Number of other ranks on the same node.
        describe_step: Names the step that an exchange belongs to, for errors.
        is_far: Whether latency is so high that all messages are sent before waiting for any of them.
    """

    group: dist.ProcessGroup | None = None
    is_far: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sent_nbytes = 0
        self.num_near = 0
        self.describe_step: Callable[[], str] = str

    def between_nodes(self, nbytes: float) -> int:
        """How many of `nbytes`, sent equally to all other ranks, leave the node."""
        others = self.world_size - 1
        return round(nbytes * (others - self.num_near) / others) if others else 0

    def with_own_counter(self) -> Comm:
        """The same ranks with a separate count of bytes."""
        return copy.copy(self)

    def end(self) -> None:
        """Cancel all posted receives. Call it on all ranks, with nothing in flight."""
        return None

    def release(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Drop references to destroyed process groups, since the last reference keeps a group's threads."""
        if self.group in groups:
            nobody: Any = dist.GroupMember.NON_GROUP_MEMBER
            self.group = nobody

    # -- collectives: counted here, sent by subclasses ---------------------------------------------------------------

    def all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        """Send row r of `x_WB` to rank r; receive row r of `out_WB` from rank r."""
        self.sent_nbytes += (self.world_size - 1) * x_WB[0].nbytes
        return self._all_to_all(out_WB, x_WB)

    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Pending:
        """Send consecutive runs of `x`, of `in_splits` elements, to the ranks in order."""
        self.sent_nbytes += (sum(in_splits) - in_splits[self.rank]) * x.element_size()
        return self._all_to_all_uneven(out, x, out_splits, in_splits)

    def all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        """Gather `x_B` of rank r into row r of `out_WB` on every rank."""
        self.sent_nbytes += (self.world_size - 1) * x_B.nbytes
        return self._all_gather(out_WB, x_B)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Reduce over ranks by `op`, in place. Bytes are counted as for a ring: 2 (W - 1) / W of the tensor."""
        self.sent_nbytes += ring_nbytes(x, self.world_size)
        return self._all_reduce(x, op)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """Copy the tensor of group rank `source` to all ranks, in place."""
        self.sent_nbytes += (self.world_size - 1) * x.nbytes * (self.rank == source)
        return self._broadcast(x, source)

    def all_reduce_max(self, x: Tensor) -> Pending:
        """Replace each element by the largest of all ranks' values, in place; they must not be NaN."""
        return self.all_reduce(x, dist.ReduceOp.MAX)

    @abstractmethod
    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending: ...
    @abstractmethod
    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending: ...
    @abstractmethod
    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending: ...
    @abstractmethod
    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending: ...
    @abstractmethod
    def _broadcast(self, x: Tensor, source: int) -> Pending: ...


def ring_nbytes(x: Tensor, world_size: int) -> int:
    """Bytes that each rank of a ring sends to reduce `x`."""
    return 2 * (world_size - 1) * x.nbytes // world_size


class GroupComm(Comm):
    """The collectives of a process group.

    Args:
        group: The process group; None: the default group. On CPU nothing else may use it while buckets are in flight.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        self._backends: dict[str, str] = {}
        self._num_exchanges = 0

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        return self._begin("all-to-all", x_WB, dist.all_to_all_single, out_WB, x_WB)

    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        return self._begin("all-to-all", x, dist.all_to_all_single, out, x, list(out_splits), list(in_splits))

    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        backend = self._backends.get(x_B.device.type) or self._backend(x_B.device)
        if backend == "gloo":  # its all-gather of bytes is slower than its all-to-all
            copies = x_B.reshape(1, -1).expand(self.world_size, -1).contiguous()
            return self._begin("all-gather", x_B, dist.all_to_all_single, out_WB, copies)
        # flat: some backends accept a stacked output only if it has one more dim than the input
        return self._begin("all-gather", x_B, _all_gather_single, out_WB.view(-1), x_B.reshape(-1))

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        return self._begin("all-reduce", x, dist.all_reduce, x, op)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return self._begin("broadcast", x, dist.broadcast, x, group_src=source)

    def _begin(self, kind: str, x: Tensor, collective: Callable[..., Any], *values: Any, **options: Any) -> Pending:
        """Start a collective. If it fails, the error names the ranks that did not take part."""
        self._num_exchanges += 1
        what = f"the {kind} of {x.nbytes:,} bytes, exchange {self._num_exchanges}"

        def explained() -> AbstractContextManager[None]:
            return naming_lost_ranks(self.group, what, self.describe_step())

        try:
            return UnderWay(collective(*values, group=self.group, async_op=True, **options), explained)
        except RuntimeError:
            with explained():
                raise

    def _backend(self, device: torch.device) -> str:
        """The backend for `device`. A group may have one per device type, or report "undefined"."""
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        self._backends[device.type] = name = group._get_backend(device).name()
        return name


@dataclass(slots=True)
class UnderWay:
    """A collective that has been started.

    Args:
        work: torch's handle.
        explained: A context that turns a failure into an error that explains it.
    """

    work: Any
    explained: Callable[[], AbstractContextManager[None]]

    def wait(self) -> object:
        try:
            return self.work.wait()
        except RuntimeError:
            with self.explained():
                raise


class Done:
    """Nothing travels, so there is nothing to wait for."""

    def wait(self) -> None:
        return None


class LocalComm(Comm):
    """Rank 0 without a process group, used to try a method, compile its kernels, or count its bytes. All other ranks
    are assumed to send what this rank sends to itself. Every collective is complete at once.

    Args:
        world_size: Number of ranks. With 1, results depend on this rank's tensors alone.
    """

    def __init__(self, world_size: int = 1) -> None:
        super().__init__(rank=0, world_size=world_size)

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        out_WB.copy_(x_WB[:1].expand_as(out_WB))
        return Done()

    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        out.view(self.world_size, -1).copy_(x[: in_splits[0]].expand(self.world_size, -1))
        return Done()

    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        out_WB.view(self.world_size, -1).copy_(x_B.reshape(1, -1).expand(self.world_size, -1))
        return Done()

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        if op == dist.ReduceOp.SUM and self.world_size > 1:
            x.mul_(self.world_size)
        return Done()

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return Done()


def gathered(value: T, group: dist.ProcessGroup | None = None, what: str = "the comparison of values") -> list[T]:
    """Gather every rank's value, pickled, in rank order. All ranks call this.

    Raises:
        LostRankError: A rank has ended. `what` names this exchange.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError:
        with naming_lost_ranks(group, what):
            raise
    return values


def gather_uneven(
    wire_B: Tensor, comm: Comm, lengths: Sequence[int] | None = None
) -> Generator[Pending, None, list[Tensor]]:
    """Gather every rank's uint8 message on every rank, in rank order. Messages are padded to the longest one.

    Args:
        wire_B: This rank's message.
        comm: Group.
        lengths: Lengths of all ranks' messages, if known; None: lengths are exchanged first.
    """
    if comm.world_size == 1:
        return [wire_B]
    if lengths is None:
        length = torch.tensor([wire_B.numel()], device=wire_B.device)
        lengths_W = torch.empty(comm.world_size, 1, dtype=torch.int64, device=wire_B.device)
        yield comm.all_gather(lengths_W, length)
        lengths = lengths_W.view(-1).tolist()
    received_WB = wire_B.new_empty(comm.world_size, max(lengths))
    yield comm.all_gather(received_WB, torch.nn.functional.pad(wire_B, (0, max(lengths) - wire_B.numel())))
    return [row[:length] for row, length in zip(received_WB, lengths, strict=True)]


def scatter_uneven(
    wires: Sequence[Tensor], comm: Comm, lengths: Sequence[int] | None = None
) -> Generator[Pending, None, list[Tensor]]:
    """Send uint8 message r to rank r, and return what each rank has sent to this one, in rank order.

    Args:
        wires: One message for each rank.
        comm: Group.
        lengths: Length of each rank's message to this rank, if known; None: lengths are exchanged first.
    """
    if comm.world_size == 1:
        return [wires[0]]
    sent = [wire.numel() for wire in wires]
    if lengths is None:
        lengths_W = torch.empty(comm.world_size, 1, dtype=torch.int64, device=wires[0].device)
        yield comm.all_to_all(lengths_W, torch.tensor(sent, device=wires[0].device).view(-1, 1))
        lengths = lengths_W.view(-1).tolist()
    received = wires[0].new_empty(sum(lengths))
    yield comm.all_to_all_uneven(received, torch.cat(list(wires)), lengths, sent)
    return list(received.split(list(lengths)))
