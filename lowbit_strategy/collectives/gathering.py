"""Every rank's message to all ranks, over one level of ranks or two, and the count of the bytes that this takes.

Two levels: (1) ranks of equal index gather the messages of all nodes, so that each byte travels to each other node
once; (2) the ranks of a node give each other what they have received. A rank sends the same number of bytes as over
one level, but only those of (1) leave the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.ordered import pieces_of_rows


class Gathering:
    """An all-gather of messages among `world_size` ranks, this one being `rank`.

    Args:
        between: All ranks; on two levels those of equal index, one of each node, in the order of the nodes.
        inside: The ranks of this node, in order. Rank ``n * inside.world_size + i`` is number i of node n. None: there
            is one level.

    Attributes:
        sent_nbytes: Bytes this rank has sent by it, counted.
    """

    def __init__(self, between: Comm, inside: Comm | None = None) -> None:
        self._between = between
        self._inside = inside
        self._comms = [between] if inside is None else [between, inside]
        num_inside, index = (1, 0) if inside is None else (inside.world_size, inside.rank)
        self.rank = between.rank * num_inside + index
        self.world_size = between.world_size * num_inside
        self.sent_nbytes = 0

    def describe_step(self) -> str:
        """Which step a gather belongs to, for errors."""
        return self._between.describe_step()

    @property
    def is_far(self) -> bool:
        """Whether latency is so high that all messages are sent before any is waited for."""
        return self._between.is_far

    @property
    def ahead_nbytes(self) -> int:
        """Memory of receives that are posted ahead, now."""
        return sum(comm.ahead_nbytes for comm in self._comms)

    def end(self) -> None:
        """Nothing is sent by it any more; on all ranks, with nothing in flight."""
        for comm in self._comms:
            comm.end()

    def release(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Let go of process groups that have been destroyed."""
        for comm in self._comms:
            comm.release(groups)

    def run(self, out_WB: Tensor, x_B: Tensor) -> Iterator[Pending]:
        """`x_B` of rank r becomes row r of `out_WB` on every rank; yields while bytes travel.

        On two levels a message goes in pieces, at most `MESSAGE_NBYTES` of all ranks together. Where ranks
        are far apart all that travels between them does so at the first yield.
        """
        if self._inside is None:
            yield self._counted(self._between, out_WB, x_B)
            return
        num_nodes, num_inside = self._between.world_size, self._inside.world_size
        out_NLB = out_WB.view(num_nodes, num_inside, -1)
        column_nbytes = self.world_size * x_B.element_size()
        for first, last in [(0, x_B.numel())] if self.is_far else pieces_of_rows(x_B.numel(), column_nbytes):
            own_NB = torch.empty(num_nodes, last - first, dtype=x_B.dtype, device=x_B.device)
            yield self._counted(self._between, own_NB, x_B[first:last])
            for start, stop in pieces_of_rows(last - first, column_nbytes):
                own_Nb = own_NB[:, start:stop].contiguous()
                all_LNb = own_Nb.new_empty(num_inside, *own_Nb.shape)
                yield self._counted(self._inside, all_LNb.view(num_inside, -1), own_Nb.view(-1))
                out_NLB[:, :, first + start : first + stop].copy_(all_LNb.transpose(0, 1))

    def between_nodes(self, nbytes: float) -> int:
        """How much of `nbytes` that a rank sends by it leaves the node."""
        if self._inside is None:
            return self._between.between_nodes(nbytes)
        return round(nbytes * (self._between.world_size - 1) / max(self.world_size - 1, 1))

    def _counted(self, comm: Comm, out_WB: Tensor, x_B: Tensor) -> Pending:
        before = comm.sent_nbytes
        pending = comm.all_gather(out_WB, x_B)
        self.sent_nbytes += comm.sent_nbytes - before
        return pending
