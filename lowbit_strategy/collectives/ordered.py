"""Exact collectives: sums of floats in rank order, and gathers over one or two levels of ranks."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.kernels.blocks import decode_sum_
from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.segments import Segment, Segments

MESSAGE_NBYTES = 2**28  # largest message inside a node, where links are fast; longer ones are cut
_FORMATS = {torch.float32: DenseFormat("float32"), torch.bfloat16: DenseFormat("bfloat16")}  # known to kernels


@functools.lru_cache(maxsize=256)
def _whole(numel: int) -> Segments:
    """The table of one whole tensor, cached because a new table must be copied to the device."""
    return Segments([Segment(0, numel, 0, 0)])


def sum_ordered(x_N: Tensor, comm: Comm) -> Generator[Pending, None, Tensor]:
    """An all-reduce whose bits depend only on the ranks' values, not on the bucket, the backend or its algorithm.

    A resumed run has different buckets in its first step than an uninterrupted one, and a ring adds in an order that
    depends on an element's place in the bucket.

    1. row r of every rank is sent to rank r
    2. rank r adds in rank order
    3. the sums are sent to all ranks

    It sends as many bytes as a ring. With a single rank the result is `x_N` itself.
    """
    world_size, numel = comm.world_size, x_N.numel()
    if world_size == 1:
        return x_N
    share = _share(numel, world_size)
    padding = share * world_size - numel
    padded_N = torch.nn.functional.pad(x_N, (0, padding)) if padding else x_N.contiguous()
    rows_WN = padded_N.view(world_size, share)
    received_WN = torch.empty_like(rows_WN)
    yield comm.all_to_all(received_WN, rows_WN)
    total_N = torch.empty_like(received_WN[0])
    add_rows_(received_WN, total_N)
    gathered_WN = torch.empty_like(rows_WN)
    yield comm.all_gather(gathered_WN, total_N)
    return gathered_WN.view(-1)[:numel]


def ordered_nbytes(numel: int, itemsize: int, world_size: int) -> int:
    """Bytes that a rank sends in `sum_ordered` of `numel` elements."""
    return 2 * (world_size - 1) * _share(numel, world_size) * itemsize


def _share(numel: int, world_size: int) -> int:
    """Elements of a row; each rank adds up one row."""
    return -(-numel // world_size)


def sum_each(tensors: list[Tensor], comm: Comm) -> Generator[Pending, None, list[Tensor]]:
    """`sum_ordered` of several tensors in one message; each sum has its tensor's shape."""
    return shaped_like(tensors, (yield from sum_ordered(flattened(tensors), comm)))


def flattened(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def shaped_like(tensors: list[Tensor], flat: Tensor) -> list[Tensor]:
    parts = flat.split(list(map(Tensor.numel, tensors)))
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def sum_rows(
    x_WGN: Tensor,
    out_GN: Tensor,
    comm: Comm,
    *,
    alpha: float = 1.0,
    buffers: WireBuffers | None = None,
) -> Generator[Pending, None, None]:
    """Reduce-scatter: ``out = alpha * sum`` of the ranks' rows for this rank, added in float32 in rank order.

    A message of more than `MESSAGE_NBYTES` is sent in pieces, which are columns of all rows. Each piece waits for the
    one before it, so that messages need memory for only one piece. The sums are the same.

    Args:
        x_WGN: For each rank r, G rows. Need not be contiguous.
        out_GN: Contiguous, of the same dtype.
        comm: Group.
        alpha: Factor of the sum.
        buffers: Lends memory for messages; None: memory is allocated.
    """
    num_ranks, num_rows, _ = x_WGN.shape
    size = num_ranks * num_rows * x_WGN.element_size()

    def room(nbytes: int) -> Tensor:
        if buffers is not None:
            return buffers.borrow(1, nbytes).view(-1).view(x_WGN.dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=x_WGN.device).view(x_WGN.dtype)

    for start, stop in pieces_of_rows(x_WGN.shape[2], size):
        x_WGn = x_WGN[:, :, start:stop]
        as_it_is = x_WGn.is_contiguous()
        sent_M = x_WGn.new_empty(0) if as_it_is else room(x_WGn.numel() * x_WGn.element_size())
        rows_WM = (x_WGn if as_it_is else sent_M.view_as(x_WGn).copy_(x_WGn)).reshape(num_ranks, -1)
        received_WM = room(rows_WM.nbytes).view_as(rows_WM)
        yield comm.all_to_all(received_WM, rows_WM)
        if stop - start == out_GN.shape[1]:
            add_rows_(received_WM, out_GN.view(-1), alpha=alpha)
        else:  # what was sent is no longer needed
            total_M = torch.empty_like(received_WM[0]) if as_it_is else rows_WM[0]
            add_rows_(received_WM, total_M, alpha=alpha)
            out_GN[:, start:stop].copy_(total_M.view(num_rows, -1))
        if buffers is not None:
            buffers.give_back(*(each for each in (sent_M, received_WM) if each.numel()))


def pieces_of_rows(row_numel: int, column_nbytes: int) -> list[tuple[int, int]]:
    """The start and end of each piece of a message in its rows; there is at least one piece.

    Args:
        row_numel: Elements of a row.
        column_nbytes: Bytes of a column of all rows.
    """
    step = max(1, MESSAGE_NBYTES // max(1, column_nbytes))
    return [(start, min(start + step, row_numel)) for start in range(0, max(1, row_numel), step)]


def add_rows_(x_WN: Tensor, out_N: Tensor, *, alpha: float = 1.0) -> None:
    """``out = alpha * (x[0] + x[1] + ...)``, added in float32 in this order by a kernel in one pass over all rows.

    Args:
        x_WN: float32, bfloat16 or float16; float32 rows may be overwritten.
        out_N: The result, of the same dtype.
        alpha: Factor of the sum.
    """
    if x_WN.dtype in _FORMATS and x_WN.numel():
        decode_sum_(x_WN.view(torch.uint8), out_N, _whole(out_N.numel()), _FORMATS[x_WN.dtype], alpha=alpha)
        return
    total_N = x_WN[0].to(torch.float32)  # the row itself if it is float32; nothing else needs it
    for row_N in x_WN[1:]:
        total_N += row_N
    out_N.copy_(total_N.mul_(alpha))


class Gathering:
    """An all-gather of messages among `world_size` ranks; this rank is `rank`.

    Args:
        between: All ranks. With two levels: the ranks of equal index, one per node, in node order.
        inside: The ranks of this node, in order. Rank ``n * inside.world_size + i`` is rank i of node n. None: there is
            one level.

    Attributes:
        sent_nbytes: Bytes that this rank has sent so far, counted.
    """

    def __init__(self, between: Comm, inside: Comm | None = None) -> None:
        self.between = between
        self._inside = inside
        self._comms = [between] if inside is None else [between, inside]
        num_inside, index = (1, 0) if inside is None else (inside.world_size, inside.rank)
        self.rank = between.rank * num_inside + index
        self.world_size = between.world_size * num_inside
        self.sent_nbytes = 0

    def end(self) -> None:
        """Stop sending. Call it on all ranks, with nothing in flight."""
        for comm in self._comms:
            comm.end()

    def release(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Drop references to destroyed process groups."""
        for comm in self._comms:
            comm.release(groups)

    def run(self, out_WB: Tensor, x_B: Tensor) -> Iterator[Pending]:
        """Gather `x_B` of rank r into row r of `out_WB` on every rank; yields while bytes travel.

        With two levels a message is sent in pieces, of at most `MESSAGE_NBYTES` for all ranks together. Between far
        ranks everything is sent before the first yield.
        """
        if self._inside is None:
            yield self._counted(self.between, out_WB, x_B)
            return
        num_nodes, num_inside = self.between.world_size, self._inside.world_size
        out_GLB = out_WB.view(num_nodes, num_inside, -1)
        column_nbytes = self.world_size * x_B.element_size()
        for first, last in [(0, x_B.numel())] if self.between.is_far else pieces_of_rows(x_B.numel(), column_nbytes):
            own_GB = torch.empty(num_nodes, last - first, dtype=x_B.dtype, device=x_B.device)
            yield self._counted(self.between, own_GB, x_B[first:last])
            for start, stop in pieces_of_rows(last - first, column_nbytes):
                own_Gb = own_GB[:, start:stop].contiguous()
                all_LGb = own_Gb.new_empty(num_inside, *own_Gb.shape)
                yield self._counted(self._inside, all_LGb.view(num_inside, -1), own_Gb.view(-1))
                out_GLB[:, :, first + start : first + stop].copy_(all_LGb.transpose(0, 1))

    def between_nodes(self, nbytes: float) -> int:
        """How many of the `nbytes` that a rank sends leave the node."""
        if self._inside is None:
            return self.between.between_nodes(nbytes)
        return round(nbytes * (self.between.world_size - 1) / max(self.world_size - 1, 1))

    def _counted(self, comm: Comm, out_WB: Tensor, x_B: Tensor) -> Pending:
        before = comm.sent_nbytes
        pending = comm.all_gather(out_WB, x_B)
        self.sent_nbytes += comm.sent_nbytes - before
        return pending
