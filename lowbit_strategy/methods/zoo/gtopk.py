"""Global top-k: the ranks' top-k are merged in pairs, so traffic hardly grows with their number."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import DenseCodec, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen, SparseLayout, counts_nbytes, entries_nbytes, layout_of
from lowbit_strategy.kernels.select import top_k
from lowbit_strategy.methods._base.positions import SparseCompressor
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.sparse_residuals import Condition, accumulate_, filler, trace
from lowbit_strategy.options.configuration import configuration

_FLOATS = DenseCodec("float32")


def merge(a: Chosen, b: Chosen, k: int) -> tuple[Chosen, Chosen]:
    """The k largest of the sum of two sparse vectors, and the rest. NaN counts as largest."""
    indices, place = torch.cat([a.indices, b.indices]).unique(return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=torch.float32, device=indices.device)
    values.index_add_(0, place[: a.indices.numel()], a.values)
    values.index_add_(0, place[a.indices.numel() :], b.values)
    kept, _ = top_k(values.abs().nan_to_num_(nan=torch.inf), k)
    dropped = torch.ones(indices.numel(), dtype=torch.bool, device=indices.device)
    dropped[kept] = False
    return Chosen(indices[kept], values[kept]), Chosen(indices[dropped], values[dropped])


def _put_back_(residual: Tensor, part: Chosen, where: Tensor) -> None:
    """Add finite entries at the positions of a mask."""
    here = where[part.indices] & part.values.isfinite()
    residual.index_add_(0, part.indices[here], part.values[here])


@configuration
class GTopK(SparseCompressor):
    """Global top-k by a tree of merges.

    Every step, for each parameter:

    1. ``h = g + e``; each rank takes the k largest ``|h|`` out of its residual, ``e' = h``, 0 there
    2. in ``log2(W)`` rounds a rank receives its partner's k entries, adds them to its own and keeps the k largest
    3. rank 0 broadcasts the result; the mean is the result over W
    4. a rank's entries at positions that are not in the result go back to its residual; entries that a merge dropped,
       at positions that are in the result, go to the residual of the rank that merged

    Each rank sends k entries at most once before the broadcast: traffic grows as k log W instead of k W. Under FSDP2
    every rank takes its rows from the result.

    Args:
        density: Share of each parameter's elements in the result, in (0, 1].

    References:
        Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
        Networks", 2019, arXiv 1901.04359. There the second kind of entries in step 4 is lost.
    """

    name: ClassVar[str] = "gtopk"
    title: ClassVar[str] = "global top-k"

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        found = accumulate_(views, state)
        residuals = [state[view.spec.name]["residual"] for view in views]
        own = []
        for view, condition, residual in zip(views, found, residuals, strict=True):
            k, is_live = self.num_kept(view.spec), condition is Condition.LIVE
            own.append(Chosen(*top_k(residual, k)) if is_live else filler(k, condition, residual.device))
            trace(view, residual, condition, own[-1], own[-1].values)
            if is_live:
                residual.index_fill_(0, own[-1].indices, 0.0)
        result, dropped = yield from self._merged(own, layout_of(views), comm, step.seed)
        for i, view in enumerate(views):
            final = torch.zeros(view.spec.numel, dtype=torch.bool, device=view.x.device)
            final[result[i].indices] = True
            if found[i] is Condition.LIVE:
                _put_back_(residuals[i], own[i], ~final)
            for part in dropped[i]:
                _put_back_(residuals[i], part, final)
            mean = torch.zeros(view.spec.numel, dtype=torch.float32, device=view.x.device)
            mean.index_copy_(0, result[i].indices, result[i].values * (1.0 / comm.world_size))
            view.write_mean_(mean, comm.rank)

    def _merged(
        self, own: Sequence[Chosen], layout: SparseLayout, comm: Comm, seed: int
    ) -> Generator[Pending, None, tuple[list[Chosen], list[list[Chosen]]]]:
        """The common result, and this rank's entries that merges dropped, for each parameter.

        A binary tree of merges with rank 0 at the root. All messages have the same size.
        """
        current = list(own)
        dropped: list[list[Chosen]] = [[] for _ in own]
        counts = [part.indices.numel() for part in own]
        nbytes = layout.table_nbytes + layout.nbytes(counts, _FLOATS)
        stride = 1
        while stride < comm.world_size:
            place = comm.rank % (2 * stride)
            sends, receives = place == stride, place == 0 and comm.rank + stride < comm.world_size
            to, source = [0] * comm.world_size, [0] * comm.world_size
            message = torch.empty(0, dtype=torch.uint8, device=layout.device)
            if sends:
                to[comm.rank - stride] = nbytes
                message = layout.pack(current, _FLOATS, seed=seed).whole
            if receives:
                source[comm.rank + stride] = nbytes
            received = torch.empty(sum(source), dtype=torch.uint8, device=layout.device)
            yield comm.all_to_all_uneven(received, message, source, to)
            if receives:
                for i, other in enumerate(self._unpack(received, counts, layout)):
                    current[i], rest = merge(current[i], other, counts[i])
                    dropped[i].append(rest)
            stride *= 2
        result = torch.empty(nbytes, dtype=torch.uint8, device=layout.device)
        if comm.rank == 0:
            result = layout.pack(current, _FLOATS, seed=seed).whole
        yield comm.broadcast(result, 0)
        return self._unpack(result, counts, layout), dropped

    def _unpack(self, message: Tensor, counts: Sequence[int], layout: SparseLayout) -> list[Chosen]:
        counts_SK, (wire,) = layout.opened(message[None])
        (sizes_V,) = layout.sizes(counts_SK)
        if list(sizes_V) != list(counts):
            raise RuntimeError(f"a partner sent {sizes_V} entries, but all ranks send {list(counts)}")
        return layout.unpack(counts_SK[0], sizes_V, wire, _FLOATS)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return (world_size - 1).bit_length() + 1  # rounds of merges, and the broadcast

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        message = counts_nbytes(spec.numel) + entries_nbytes(self.num_kept(spec), _FLOATS)
        return 2 * message * (world_size - 1) // world_size  # mean over ranks; rank 0 sends most
