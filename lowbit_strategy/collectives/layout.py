"""Layout of parameters: each parameter is cut over the ranks separately, never by bucket.

A parameter of n elements is cut into W shares of ``row_numel`` elements; rank r owns flat elements
``[r * row_numel, (r + 1) * row_numel)``, as far as they exist. Under DDP ``row_numel`` is a multiple of the block size,
so the grid of blocks is the same for every world size; under FSDP2 it is the framework's shard (whole dim-0 rows).

With two levels, a rank reduces a part of every parameter together with the ranks of other nodes that have the same
part.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32
from lowbit_strategy.kernels.segments import Segment

ALIGNMENT = 16  # in bytes: every section of a message starts on a multiple, so that kernels can read wide words
Role = Literal["embedding", "head", "other"]
MemoryOrder = tuple[int, ...] | None


@dataclass(frozen=True)
class TensorSpec:
    """One parameter: its name in the model, unsharded shape, role, and order in memory.

    Args:
        name: Its name in the model.
        shape: The unsharded shape.
        role: What the parameter is used for.
        memory_order: Dims from outermost to innermost in memory, for example of ``channels_last``; None: in order. Flat
            gradients and residuals keep this order.
        sharded: Whether FSDP2 shards it over the ranks that reduce it. If so, each rank gets the sum of its own rows
            (reduce-scatter); if not, all ranks get the mean (all-reduce).
        whole_shape: Shape of the whole parameter, if `shape` belongs to a part.
        ranges: If this is a part: start and length of each of its runs of elements in the flat parameter.
        part_row_numel: Elements of each rank's share of a sharded part, padding included.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "other"
    memory_order: MemoryOrder = None
    sharded: bool = False
    whole_shape: tuple[int, ...] | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    part_row_numel: int | None = None

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def whole_numel(self) -> int:
        """Elements of the whole parameter, even if this is a part."""
        return math.prod(self.shape if self.whole_shape is None else self.whole_shape)

    @property
    def whole(self) -> TensorSpec:
        """The whole parameter, even if this is a part."""
        if self.whole_shape is None:
            return self
        return replace(self, shape=self.whole_shape, whole_shape=None, ranges=(), part_row_numel=None)

    def part_for(self, index: int, count: int, num_peers: int) -> TensorSpec:
        """The part that rank `index` of a node's `count` ranks reduces, together with its `num_peers` (itself
        included).

        Parts are whole rows of the outermost dim in memory. If parameters are sharded over all ranks, a rank reduces
        the shards of all ranks with its index in their node; otherwise its part is one run of rows.
        """
        row_dim = self.memory_order[0] if self.memory_order else 0
        shape, ranges, row_numel = _part_of(self.shape, row_dim, index, count, num_peers if self.sharded else 1)
        part_row_numel = row_numel if self.sharded else None
        return replace(self, shape=shape, whole_shape=self.shape, ranges=ranges, part_row_numel=part_row_numel)

    @property
    def runs(self) -> list[list[int]]:
        """Start and length of each run of elements in the flat parameter, as saved; a whole parameter is one run."""
        return [[0, self.numel]] if self.whole_shape is None else [list(run) for run in self.ranges]

    def take(self, whole_N: Tensor) -> Tensor:
        """This part of the flat parameter `whole_N`, or all of it."""
        if self.whole_shape is None:
            return whole_N
        return torch.cat(views_at(whole_N, self.ranges))

    def row_numel(self, world_size: int, block_size: int) -> int:
        """Elements of each reducing rank's share, padding included."""
        if not self.sharded:
            return round_up(-(-self.numel // world_size), block_size)
        if self.part_row_numel is not None and self.part_row_numel * world_size >= self.numel:  # a rank may try alone
            return self.part_row_numel
        return dim0_row_numel(self.shape, world_size)


@functools.lru_cache(maxsize=256)  # cached: layers are equal, and a part has a range per node
def _part_of(
    shape: tuple[int, ...], row_dim: int, index: int, count: int, num_runs: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]:
    """Shape and ranges of the part that rank `index` of `count` reduces, and the elements of a run's rows."""
    dims = shape or (1,)
    per_row = math.prod(dims[:row_dim] + dims[row_dim + 1 :])
    num_shares = count * num_runs
    rows = -(-dims[row_dim] // num_shares)
    starts = [min(dims[row_dim], rows * share) for share in range(index, num_shares, count)]
    lengths = [min(dims[row_dim] - start, rows) for start in starts]
    ranges = tuple((start * per_row, length * per_row) for start, length in zip(starts, lengths, strict=True))
    return (*dims[:row_dim], sum(lengths), *dims[row_dim + 1 :]), ranges, rows * per_row


class ParamView(NamedTuple):
    """One parameter in a bucket: its place in the bucket and in the state, and its gradient there. All offsets count
    elements.

    Args:
        spec: The parameter, sharded (reduce-scatter) or not (all-reduce).
        world_size: Number of ranks over which it is cut.
        row_numel: Elements of each rank's share, padding included.
        offset: First element of rank 0's share in the bucket; under FSDP2 also of this rank's share in the output
            buffer.
        row_stride: Elements from one rank's share to the next: ``row_numel`` under DDP, the bucket's row under FSDP2.
        state_offset: First element of this rank's share in state that holds one share of each parameter; in state of
            whole parameters, W times this offset.
        out_offset: Reduce-scatter: first element of this rank's share in the output buffer. None: `offset`.
        x: The gradient, once the bucket has arrived. All-reduce: flat ``[numel]``. Reduce-scatter: ``[W, row_numel]``,
            row r for rank r, padded with zeros.
        out: All-reduce: receives the mean, flat ``[numel]``; may be `x` itself. Reduce-scatter: receives the *sum* of
            this rank's row, ``[row_numel]``, since FSDP2 divides afterwards.
        tracer: Called by `trace`; None: no observer.
    """

    spec: TensorSpec
    world_size: int
    row_numel: int
    offset: int = 0
    row_stride: int = 0
    state_offset: int = 0
    out_offset: int | None = None
    x: Tensor = None  # type: ignore[assignment]
    out: Tensor = None  # type: ignore[assignment]
    tracer: Callable[[Tensor, Tensor], object] | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def row_length(self, rank: int) -> int:
        """Elements of the share of `rank` without padding; 0 if it owns nothing of this parameter."""
        return row_length(self.spec.numel, self.row_numel, rank)

    def segments(self, wire_at: int, message_nbytes: int, block_size: int = 1) -> list[Segment]:
        """The shares of all ranks in a bucket, at byte `wire_at` of each rank's message of `message_nbytes`.

        In state of whole parameters a share begins on a multiple of `block_size`.
        """
        state_at, row_state = self.state_offset * self.world_size, round_up(self.row_numel, block_size)
        return [
            Segment(
                self.offset + r * self.row_stride,
                length,
                state_at + r * row_state,
                r * message_nbytes + wire_at,
                salt_of(self.name, r),
            )
            for r in range(self.world_size)
            if (length := self.row_length(r))
        ]

    def common_layout(self) -> tuple[Any, ...]:
        """The values that are equal on all ranks, for a layout's checksum."""
        return self.name, self.offset, self.row_stride, self.spec.numel, self.row_numel, self.world_size

    def within(self, x: Tensor, out: Tensor) -> ParamView:
        """This view with its gradient in the bucket `x` and its result in `out`."""
        if self.spec.sharded:
            row = slice(self.offset, self.offset + self.row_numel)
            return self._replace(x=x.view(self.world_size, -1)[:, row], out=out[row])
        where = slice(self.offset, self.offset + self.spec.numel)
        return self._replace(x=x[where], out=out[where])

    def flat(self) -> Tensor:
        """The whole gradient, flat ``[numel]``, in both layouts; under reduce-scatter it is a copy."""
        return self.x.reshape(-1)[: self.spec.numel] if self.spec.sharded else self.x

    def rows(self, values_N: Tensor) -> Tensor:
        """Cut flat ``[numel]`` values into ``[W, row_numel]``: row r for rank r, padded with zeros."""
        padding = self.row_numel * self.world_size - self.spec.numel
        padded_N = torch.nn.functional.pad(values_N, (0, padding)) if padding else values_N
        return padded_N.view(self.world_size, self.row_numel)

    def trace(self, compensated: Tensor, sent: Tensor) -> None:
        """Pass the gradient plus the residual, and what the other ranks decode, of any shape, to the tracer, before the
        mean may overwrite the gradient.
        """
        if self.tracer is not None:
            self.tracer(compensated.reshape(-1), sent.reshape(-1))

    def write_mean_(self, mean_N: Tensor, rank: int) -> None:
        """Store the mean over ranks, flat ``[numel]`` of any float dtype, in `out`, converted to its form."""
        if not self.spec.sharded:
            self.out.copy_(mean_N)
            return
        start, length = rank * self.row_numel, self.row_length(rank)
        torch.mul(mean_N[start : start + length], self.world_size, out=self.out[:length])
        if length < self.row_numel:
            self.out[length:] = 0


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def dim0_row_numel(shape: tuple[int, ...], world_size: int) -> int:
    """Elements per share, if shares are equal and consist of whole dim-0 rows, as under FSDP2 and inside a node."""
    dim0 = shape[0] if shape else 1
    return -(-dim0 // world_size) * (math.prod(shape) // dim0) if dim0 else 0


def row_length(numel: int, row_numel: int, rank: int) -> int:
    """Number of elements that `rank` owns if `numel` elements are cut into shares of `row_numel`."""
    return max(0, min(row_numel, numel - rank * row_numel))


def salt_of(name: str, number: int) -> int:
    """32 bits that make random numbers differ between parameters, and between messages by their `number`."""
    return hash32(zlib.crc32(name.encode()) + number * GOLDEN)


def views_at(whole_N: Tensor, runs: Iterable[Sequence[int]]) -> list[Tensor]:
    """Views of the runs, each a start and a length, of a flat parameter. Joined they are a part of it."""
    return [whole_N[start : start + length] for start, length in runs]


def add_part_(whole_N: Tensor, runs: Sequence[Sequence[int]], part_N: Tensor) -> None:
    """Add a part to the flat parameter to which it belongs."""
    for view, run_N in zip(views_at(whole_N, runs), part_N.split([length for _, length in runs]), strict=True):
        view += run_N


def in_memory_order(values_N: Tensor, shape: Sequence[int], source: MemoryOrder, target: MemoryOrder) -> Tensor:
    """Convert a parameter's flat values from one memory order to another."""
    if source == target:
        return values_N
    dims = range(len(shape))
    source, target = tuple(dims) if source is None else source, tuple(dims) if target is None else target
    values = values_N.view([shape[dim] for dim in source])
    return values.permute([source.index(dim) for dim in target]).reshape(-1)
