"""A transport for ranks that are far apart, in place of torch's collectives.

`FarComm` sends point-to-point messages, whose receives are posted ahead. gloo sends only two of a group's collectives
at a time, and a sender first waits until the receiver has reported that its receive is posted. Over a link where a
message takes 75 ms, that costs more than the bytes. Here every pair of ranks communicates separately, and all exchanges
travel at once. As soon as one has ended, the receive for the next of its kind and size is posted: in the next step the
message has the same size, and its sender need not wait.

Tags assign messages to exchanges: all exchanges of one kind and size share a channel, in which messages arrive in the
order in which they were sent. A channel's tag is computed from its kind and size. All ranks begin and end the exchanges
of a channel in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import GroupComm, Pending, naming_lost_ranks

_KINDS = ("all-to-all", "all-gather", "reduced", "uneven")
_NUM_SIZES = 2**16  # distinct sizes of `_size_index`, up to a terabyte
_SIZE_BITS = 12
_KEPT_ROUNDS = 16  # a channel is closed if it has not been used while all others were used this often


class FarComm(GroupComm):
    """The collectives of a gloo group on CPU that nothing else uses. Results equal those of `GroupComm` bit for bit,
    except for the order of sums.

    Args:
        group: A group made only for this object and its twins.
        numbers: Numbers for the communicators that share the group, the next one first; each has its own tags.
    """

    is_far = True

    def __init__(self, group: dist.ProcessGroup, numbers: Iterator[int] | None = None) -> None:
        super().__init__(group)
        self._numbers = itertools.count() if numbers is None else numbers
        self._first_tag = next(self._numbers) * len(_KINDS) * _NUM_SIZES
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._ending: list[_Channel] = []
        self._num_under_way = 0

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of memory for the receives that are posted ahead now."""
        return sum(channel.nbytes for channel in (*self._channels.values(), *self._ending))

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        rows = x_WB.contiguous().view(self.world_size, -1)
        return self._exchange("all-to-all", out_WB.view(self.world_size, -1), list(rows))

    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        row = x_B.reshape(-1)
        return self._exchange("all-gather", out_WB.view(self.world_size, -1), [row] * self.world_size)

    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        channel = self._channel("uneven", 0)
        came, sent = list(out.split(list(out_splits))), list(x.split(list(in_splits)))
        under_way = self._under_way("uneven all-to-all", x.nbytes)
        came[self.rank].copy_(sent[self.rank])
        with under_way.explained():
            under_way.sent = sent
            under_way.works = [channel.post(came[r], r) for r in self._others() if came[r].numel()]
            under_way.works += [channel.send(sent[r], r) for r in self._others() if sent[r].numel()]
        return under_way

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        """Two exchanges, in which each rank computes its part of the result, since gloo's all-reduce has many
        consecutive messages. One rank adds each part in rank order, so all ranks get the same bits, but not gloo's.
        """
        if op not in _REDUCTIONS:
            return super()._all_reduce(x, op)
        reduce = _REDUCTIONS[op]
        padded_N = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % self.world_size))
        rows_WN = padded_N.view(self.world_size, -1)
        came_WN, result_WN = torch.empty_like(rows_WN), torch.empty_like(rows_WN)
        under_way = self._exchange("all-to-all", came_WN, list(rows_WN))
        arrived = under_way.arrived

        def reduce_own_part() -> None:
            arrived()
            self._exchange("reduced", result_WN, [reduce(came_WN)] * self.world_size).wait()
            x.copy_(result_WN.view(-1)[: x.numel()].view_as(x))

        under_way.arrived = reduce_own_part
        return under_way

    def with_own_counter(self) -> FarComm:
        """A twin for exchanges that a different thread begins, with the same ranks, and different tags from all other
        twins, whose receives may still be posted.
        """
        assert self.group is not None
        twin = FarComm(self.group, self._numbers)
        twin.num_near, twin.describe_step = self.num_near, self.describe_step
        return twin

    def end(self) -> None:
        ended = [*self._channels.values(), *self._ending]
        for channel in self._channels.values():
            channel.end()
        for channel in ended:
            channel.wait_for_end()
        self._channels.clear()
        self._ending.clear()

    def release(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Posted receives end with the group."""
        if self.group in groups:
            self._channels.clear()
            self._ending.clear()
        super().release(groups)

    def _exchange(self, kind: str, out_WB: Tensor, rows: Sequence[Tensor]) -> _Traveling:
        row_nbytes = rows[0].nbytes
        under_way = self._under_way(kind, row_nbytes * self.world_size)
        out_WB[self.rank].copy_(rows[self.rank])
        if not row_nbytes or self.world_size == 1:
            return under_way
        channel = self._channel(kind, row_nbytes)
        channel.last_use = self._num_exchanges
        with under_way.explained():
            posted = channel.take()
            under_way.sent = rows
            under_way.works = posted.works + [channel.send(rows[r], r) for r in self._others()]

        def arrived() -> None:
            for r, row_B in zip(self._others(), posted.rows, strict=True):
                out_WB[r].copy_(row_B[:row_nbytes].view(out_WB.dtype))
            with contextlib.suppress(RuntimeError):  # a rank may have left; the next exchange would report it
                channel.post_ahead(posted.rows)

        under_way.arrived = arrived
        return under_way

    def _under_way(self, kind: str, nbytes: int) -> _Traveling:
        if not self._num_under_way:
            self._give_up_channels()
        self._num_exchanges += 1
        self._num_under_way += 1
        return _Traveling(self, f"the {kind} of {nbytes:,} bytes, exchange {self._num_exchanges}")

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that all ranks begin with different ones."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _channel(self, kind: str, row_nbytes: int) -> _Channel:
        size, capacity = _size_index(row_nbytes)
        if (kind, size) not in self._channels:
            tag = self._first_tag + _KINDS.index(kind) * _NUM_SIZES + size
            self._channels[kind, size] = _Channel(self, tag, capacity, self._others())
        return self._channels[kind, size]

    def _give_up_channels(self) -> None:
        """Close channels if sizes have changed. Nothing is in flight, so all ranks have posted the same receives.

        Posted receives get an empty message, and are waited for when the next exchange begins alone.
        """
        for channel in self._ending:
            channel.wait_for_end()
        self._ending.clear()
        patience = _KEPT_ROUNDS * sum(max(1, len(channel.posted)) for channel in self._channels.values())
        old = [k for k, c in self._channels.items() if c.posted and self._num_exchanges - c.last_use > patience]
        for key in old:
            channel = self._channels.pop(key)
            channel.end()
            self._ending.append(channel)


def _size_index(nbytes: int) -> tuple[int, int]:
    """The number of a message's size, rounded up to twelve significant bits, and that size."""
    shift = max(0, nbytes.bit_length() - _SIZE_BITS)
    leading = -(-nbytes >> shift)
    return (shift << (_SIZE_BITS - 1)) + leading, leading << shift


_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda rows_WN: rows_WN.sum(0, dtype=rows_WN.dtype),
    dist.ReduceOp.MAX: lambda rows_WN: rows_WN.amax(0),
    dist.ReduceOp.MIN: lambda rows_WN: rows_WN.amin(0),
}


class _Posted(NamedTuple):
    """The receives of one exchange, a row from each other rank."""

    rows: Tensor
    works: list[Any]


class _Channel:
    """The exchanges of one kind and size. They do not wait for each other, but keep their order.

    Args:
        comm: Its communicator.
        tag: Tag of its messages.
        capacity: Largest message, in bytes.
        others: The other ranks, in the order in which messages are sent.
    """

    def __init__(self, comm: FarComm, tag: int, capacity: int, others: list[int]) -> None:
        self._group = comm.group
        self._tag = tag
        self._capacity = capacity
        self._others = others
        self._sends: list[Any] = []
        self.posted: deque[_Posted] = deque()
        self.last_use = 0

    @property
    def nbytes(self) -> int:
        return sum(each.rows.nbytes for each in self.posted)

    def send(self, x: Tensor, target: int) -> Any:
        return dist.isend(x, group=self._group, tag=self._tag, group_dst=target)

    def post(self, x: Tensor, source: int) -> Any:
        return dist.irecv(x, group=self._group, tag=self._tag, group_src=source)

    def take(self) -> _Posted:
        """Take the receives that were posted first."""
        if not self.posted:
            self.post_ahead(torch.zeros(len(self._others), self._capacity, dtype=torch.uint8))
        return self.posted.popleft()

    def post_ahead(self, rows: Tensor) -> None:
        works = [self.post(row_B, r) for r, row_B in zip(self._others, rows, strict=True)]
        self.posted.append(_Posted(rows, works))

    def end(self) -> None:
        """Send an empty message to all ranks' posted receives."""
        nothing = torch.zeros(1, dtype=torch.uint8)
        self._sends = [self.send(nothing, r) for _ in self.posted for r in self._others]

    def wait_for_end(self) -> None:
        for work in (*(work for each in self.posted for work in each.works), *self._sends):
            work.wait()


class _Traveling:
    """An exchange that has begun."""

    is_far = True

    def __init__(self, comm: FarComm, what: str) -> None:
        self._comm = comm
        self._what = what
        self._done = False
        self.works: list[Any] = []  # receives and sends
        self.sent: Sequence[Tensor] = ()  # kept until it has been sent
        self.arrived: Callable[[], None] = lambda: None

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return naming_lost_ranks(self._comm.group, self._what, self._comm.describe_step())

    def wait(self) -> object:
        if self._done:
            return None
        with self.explained():
            for work in self.works:
                work.wait()
        self._done, self.sent = True, ()
        self._comm._num_under_way -= 1
        self.arrived()  # which may begin another exchange
        return None
