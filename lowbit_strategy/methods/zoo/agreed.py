"""All ranks send the same positions: from a shared seed, of one rank in turns, or found in a sum of sketches."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import ordered_nbytes, sum_each
from lowbit_strategy.collectives.sparse_layout import POSITION_NBYTES, Chosen, counts_nbytes
from lowbit_strategy.kernels.reference.rng import dither, hash32, stream_key
from lowbit_strategy.kernels.reference.sparse import sample_positions
from lowbit_strategy.kernels.select import top_k
from lowbit_strategy.methods._base.compressor import check_positive
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.sparse import CommonPositions
from lowbit_strategy.methods._base.sparse_residuals import Condition, accumulate_, conditions, layout_of
from lowbit_strategy.options.configuration import configuration


@configuration
class RandomK(CommonPositions):
    """Random sparsification.

    Every step, for each parameter of n elements:

    1. the ranks draw the same ``k = max(1, round(density * n))`` positions: one at random from each of k equal parts,
       by a hash of the step's shared seed, the parameter's name and the part
    2. every rank sends its ``h = g + e`` there; ``e' = h``, 0 there
    3. the mean over ranks there, 0 elsewhere

    Args:
        values: See `TopK`; the owner's rounding errors stay in its residual. With `scale` they are lost.
        scale: Send ``g / probability`` instead, without a residual: unbiased, with n / k times the variance.

    References:
        Stich et al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599; Wangni et al., 2018, arXiv 1710.09854.
    """

    name: ClassVar[str] = "randomk"

    scale: bool = False

    @property
    def label(self) -> str:
        return f"random-k {self.density:g}{', scaled' if self.scale else ''}"

    @property
    def residual_gain(self) -> float | None:
        return None if self.scale else 1.0

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return {} if self.scale else CommonPositions.init(self, specs, device)

    def accumulate_(self, views: Sequence[ParamView], state: ReducerState) -> list[Condition]:
        return conditions([view.x for view in views]) if self.scale else accumulate_(views, state)

    def positions(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        chosen = []
        for view in views:
            seed = step.shared_seed ^ zlib.crc32(view.spec.name.encode())
            chosen.append(sample_positions(view.spec.numel, self.num_kept(view.spec), seed, view.x.device))
        return chosen
        yield  # a generator that has nothing to wait for

    def values_at(self, view: ParamView, tensors: StateTensors, indices: Tensor) -> Tensor:
        if not self.scale:
            return CommonPositions.values_at(self, view, tensors, indices)
        num = indices.numel()
        edges = torch.arange(num + 1, device=indices.device) * view.spec.numel // max(num, 1)
        return view.flat().index_select(0, indices).float() * edges.diff()  # one over each position's probability

    def update_residual_(self, view: ParamView, tensors: StateTensors, chosen: Chosen, sent: Tensor) -> None:
        if not self.scale:
            CommonPositions.update_residual_(self, view, tensors, chosen, sent)


@configuration
class ScaleCom(CommonPositions):
    """Cyclic local top-k with a low-pass residual.

    Every step, for each parameter:

    1. ``h = m + g`` on every rank
    2. rank ``step mod W`` chooses the k largest of its own ``|h|`` and broadcasts their positions
    3. all ranks send their ``h`` there; the mean over ranks there, 0 elsewhere
    4. ``m' = m + beta * (g - sent)``

    Traffic does not grow with the number of ranks.

    Args:
        beta: Of the low-pass filter, in (0, 1]: 1 is plain error feedback; use 0.1 to 0.3 with large learning rates,
            which otherwise make the ranks' residuals diverge.

    References:
        Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
        Training", 2020, arXiv 2104.11125. The filter's constants are unchecked.
    """

    name: ClassVar[str] = "scalecom"
    title: ClassVar[str] = "scalecom"
    position_messages: ClassVar[int] = 1

    beta: float = 1.0

    def __post_init__(self) -> None:
        CommonPositions.__post_init__(self)
        if not 0.0 < self.beta <= 1.0:
            raise ValueError(f"beta must be in (0, 1], got {self.beta!r}")

    @property
    def residual_gain(self) -> float | None:
        return self.beta  # the residual is this times what has not been sent

    def positions(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        leader = step.index % comm.world_size
        layout = layout_of(views)
        count = sum(self.num_kept(view.spec) for view in views)
        message = torch.empty(layout.table_nbytes + POSITION_NBYTES * count, dtype=torch.uint8, device=layout.device)
        if comm.rank == leader:
            located = layout.locate(
                [top_k(state[view.spec.name]["residual"], self.num_kept(view.spec))[0] for view in views]
            )
            message = torch.cat([located.counts_DK[0].view(torch.uint8), located.positions])
        yield comm.broadcast(message, leader)
        counts_SK, (wire,) = layout.opened(message[None])
        (sizes_V,) = layout.sizes(counts_SK)
        if sum(sizes_V) != count:
            raise RuntimeError(f"rank {leader} announces {sum(sizes_V)} positions where all ranks send {count}")
        return layout.positions(counts_SK[0], sizes_V, wire)

    def update_residual_(self, view: ParamView, tensors: StateTensors, chosen: Chosen, sent: Tensor) -> None:
        if self.beta == 1.0:
            CommonPositions.update_residual_(self, view, tensors, chosen, sent)
            return
        # The residual is h = m + g. It becomes h - beta * sent - (1 - beta) * g = m + beta * (g - sent).
        left = (chosen.values - self.beta * sent).nan_to_num_(0.0, 0.0, 0.0)
        tensors["residual"].index_copy_(0, chosen.indices, left)
        tensors["residual"].add_(view.flat(), alpha=self.beta - 1.0)

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        message = counts_nbytes(spec.numel) + POSITION_NBYTES * self.num_kept(spec)
        return message * (world_size - 1) // world_size


class CountSketch:
    """A linear table of a vector in which its largest elements can be found.

    In each row every element has a random sign and a column that it shares with others. Consecutive elements have
    consecutive columns, from a random one on: a row is a sum of parts of the vector in a fixed order, with the same
    bits on every device.

    Args:
        numel: Of the vector.
        rows: Of the table.
        columns: Of the table.
        seed: The same on all ranks.
        device: Of the vector.
    """

    def __init__(self, numel: int, rows: int, columns: int, seed: int, device: torch.device) -> None:
        self.numel, self.columns = numel, columns
        num_parts = -(-numel // columns)
        column = torch.arange(columns, device=device)
        starts = [[hash32(seed + hash32(row) + part) % columns for part in range(num_parts)] for row in range(rows)]
        self._columns_RPC = (column + torch.tensor(starts, device=device).view(rows, num_parts, 1)) % columns
        keys = [stream_key(seed, row, 0) for row in range(rows)]
        self._signs_RN = torch.stack([2.0 * (dither(0, numel, key, device) >= 0).float() - 1.0 for key in keys])

    def of(self, x_N: Tensor) -> Tensor:
        """float32 [rows, columns]."""
        shape, padding = self._columns_RPC.shape, -self.numel % self.columns
        parts_RPC = torch.nn.functional.pad(x_N * self._signs_RN, (0, padding)).view(shape)
        placed = torch.empty_like(parts_RPC).scatter_(2, self._columns_RPC, parts_RPC)  # no two at one place
        return placed.sum(1)

    def estimate(self, table_RC: Tensor) -> Tensor:
        """float32 [numel]: the median over rows of each element's estimates."""
        shape = self._columns_RPC.shape
        read = table_RC[:, None].expand(shape).gather(2, self._columns_RPC).view(shape[0], -1)[:, : self.numel]
        return (read * self._signs_RN).median(0).values


@configuration
class SketchedSGD(CommonPositions):
    """The largest elements of the *sum* over ranks, found in count sketches that are added up.

    Every step, for each parameter, on every rank:

    1. ``h = g + e``
    2. a count sketch of h, `rows` tables of ``columns_per_entry * k`` sums, is added up over ranks
    3. each element is estimated by the median over rows; the ``k = density * n`` largest are the same on all ranks
    4. all ranks add up their exact h there; ``e' = h``, 0 there

    Traffic does not grow with the number of ranks, and the elements are the largest of the sum. A table costs ten times
    as much as top-k for the same k, so it pays from some tens of ranks on.

    Args:
        rows: Of the sketch. More: fewer small elements are taken for large ones.
        columns_per_entry: Columns per element to find. More: the same.

    References:
        Ivkin et al., "Communication-efficient Distributed SGD with Sketching", 2019, arXiv 1903.04488, algorithm 2;
        Rothchild et al., "FetchSGD", 2020, arXiv 2007.07682, with sketches of residuals on a server.
    """

    name: ClassVar[str] = "sketchedsgd"
    title: ClassVar[str] = "sketched"
    position_messages: ClassVar[int] = 2
    own_temporary_nbytes: ClassVar[float] = 62.0

    rows: int = 5
    columns_per_entry: int = 4

    def __post_init__(self) -> None:
        CommonPositions.__post_init__(self)
        check_positive("rows", self.rows)
        check_positive("columns_per_entry", self.columns_per_entry)

    def _columns(self, spec: TensorSpec) -> int:
        return self.columns_per_entry * self.num_kept(spec)

    def positions(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        sketches, tables = [], []
        for view in views:
            seed = step.shared_seed ^ zlib.crc32(view.spec.name.encode())
            sketches.append(CountSketch(view.spec.numel, self.rows, self._columns(view.spec), seed, view.x.device))
            tables.append(sketches[-1].of(state[view.spec.name]["residual"]))
        totals = yield from sum_each(tables, comm)
        return [
            top_k(sketch.estimate(total).nan_to_num_(), self.num_kept(view.spec))[0].long()
            for view, sketch, total in zip(views, sketches, totals, strict=True)
        ]

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return ordered_nbytes(self.rows * self._columns(spec), 4, world_size) if spec.numel else 0
