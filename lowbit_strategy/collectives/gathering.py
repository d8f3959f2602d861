"""Every rank's message to all ranks, over one level of ranks or two, and the count of the bytes that this takes.

Two levels: (1) ranks of equal index gather the messages of all nodes, so that each byte travels to each other node
once; (2) the ranks of a node give each other what they have received. A rank sends as many bytes as over one level, but
only those of (1) leave the node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.ordered import pieces_of_rows


class Gathering(ABC):
    """An all-gather of messages among `world_size` ranks, this one being `rank`.

    Attributes:
        sent_nbytes: Bytes this rank has sent by it, counted.
    """

    def __init__(self, rank: int, world_size: int, comms: Sequence[Comm]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sent_nbytes = 0
        self._comms = comms

    def place(self) -> str:
        """Which step a gather belongs to, for errors."""
        return self._comms[0].place()

    @property
    def is_far(self) -> bool:
        """Whether messages take so long that all are to travel at once, over one level."""
        return len(self._comms) == 1 and self._comms[0].is_far

    @property
    def ahead_nbytes(self) -> int:
        """Memory of receives that are posted ahead, now."""
        return sum(comm.ahead_nbytes for comm in self._comms)

    def release(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Let go of process groups that have been destroyed."""
        for comm in self._comms:
            comm.release(groups)

    @abstractmethod
    def run(self, out_WB: Tensor, x_B: Tensor) -> Iterator[Pending]:
        """`x_B` of rank r becomes row r of `out_WB` on every rank; yields while bytes travel."""

    @abstractmethod
    def between_nodes(self, nbytes: float) -> int:
        """How much of `nbytes` that a rank sends by it leaves the node."""

    def _counted(self, comm: Comm, out_WB: Tensor, x_B: Tensor) -> Pending:
        before = comm.sent_nbytes
        pending = comm.all_gather(out_WB, x_B)
        self.sent_nbytes += comm.sent_nbytes - before
        return pending


class FlatGathering(Gathering):
    """One collective among all ranks of `comm`."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.rank, comm.world_size, [comm])
        self._comm = comm

    def run(self, out_WB: Tensor, x_B: Tensor) -> Iterator[Pending]:
        yield self._counted(self._comm, out_WB, x_B)

    def between_nodes(self, nbytes: float) -> int:
        return self._comm.between_nodes(nbytes)


class NodeGathering(Gathering):
    """Between nodes, then inside of them.

    Args:
        between: Ranks of equal index, one of each node, in the order of the nodes.
        inside: The ranks of this node, in order. Rank ``n * inside.world_size + i`` is number i of node n.
    """

    def __init__(self, between: Comm, inside: Comm) -> None:
        rank, world_size = between.rank * inside.world_size + inside.rank, between.world_size * inside.world_size
        super().__init__(rank, world_size, [between, inside])
        self._between = between
        self._inside = inside

    def run(self, out_WB: Tensor, x_B: Tensor) -> Iterator[Pending]:
        """A message goes in pieces of which all ranks' together have at most `MESSAGE_NBYTES`."""
        num_nodes, num_inside = self._between.world_size, self._inside.world_size
        out_NLB = out_WB.view(num_nodes, num_inside, -1)
        for start, stop in pieces_of_rows(x_B.numel(), self.world_size * x_B.element_size()):
            own_Nb = torch.empty(num_nodes, stop - start, dtype=x_B.dtype, device=x_B.device)
            yield self._counted(self._between, own_Nb, x_B[start:stop])
            all_LNb = torch.empty(num_inside, *own_Nb.shape, dtype=x_B.dtype, device=x_B.device)
            yield self._counted(self._inside, all_LNb.view(num_inside, -1), own_Nb.view(-1))
            out_NLB[:, :, start:stop].copy_(all_LNb.transpose(0, 1))

    def between_nodes(self, nbytes: float) -> int:
        return round(nbytes * (self._between.world_size - 1) / max(self.world_size - 1, 1))
