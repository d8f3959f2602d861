"""DEFT: assigns a model's layers to ranks, and each rank selects in its own layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.kernels.select import top_k
from lowbit_strategy.methods._base.positions import CommonPositions, num_kept
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.options.configuration import configuration

_POSITION_NBYTES = 4
_PARTS_PER_RANK = 4  # at least: larger parts cannot be assigned evenly


class AssignedPart(NamedTuple):
    """A part of a parameter in which one rank selects.

    Args:
        view: Index of the parameter's view.
        start, stop: Its elements.
        kept: Number of selected elements.
        rank: The rank that selects them.
    """

    view: int
    start: int
    stop: int
    kept: int
    rank: int


def parts_of(sizes: Sequence[int], world_size: int) -> list[tuple[int, int, int]]:
    """Parameter, start and stop: none larger than a quarter of a rank's share of the model."""
    share = max(1, -(-sum(sizes) // (_PARTS_PER_RANK * world_size)))
    found = []
    for index, size in enumerate(sizes):
        count = -(-size // share)
        edges = [size * each // count for each in range(count + 1)] if count else [0]
        found += [(index, *edge) for edge in itertools.pairwise(edges)]
    return found


def assign_parts(
    sizes: Sequence[int], norms: Sequence[float], density: float, world_size: int, first_rank: int
) -> list[AssignedPart]:
    """Assign parts to ranks, with the number of elements to select in each; the same on all ranks.

    1. the k of the model is split over parts by their norms, at least one each
    2. in descending order of cost, ``size * log2(k)``, each part goes to the rank with the least cost so far, ties in
       order from `first_rank`
    """
    parts = parts_of(sizes, world_size)
    lengths = [stop - start for _, start, stop in parts]
    kept = _split(num_kept(density, sum(sizes)), norms, lengths)
    costs = [length * math.log2(k + 1) for length, k in zip(lengths, kept, strict=True)]
    loads, ranks = [0.0] * world_size, [0] * len(parts)
    for index in sorted(range(len(parts)), key=lambda each: -costs[each]):
        least = min(range(world_size), key=lambda rank: (loads[rank], (rank - first_rank) % world_size))
        ranks[index] = least
        loads[least] += costs[index]
    return [AssignedPart(*part, k, rank) for part, k, rank in zip(parts, kept, ranks, strict=True)]


def _split(wanted: int, norms: Sequence[float], lengths: Sequence[int]) -> list[int]:
    """Split in proportion to norms; what exceeds a part's length goes to the others."""
    kept = [0] * len(lengths)
    open_parts = list(range(len(lengths)))
    while open_parts and wanted > 0:
        total = sum(norms[index] for index in open_parts)
        shares = {index: wanted * norms[index] / total if total else wanted / len(open_parts) for index in open_parts}
        full = [index for index in open_parts if shares[index] >= lengths[index]]
        for index in full or open_parts:
            kept[index] = lengths[index] if index in full else round(shares[index])
            wanted -= kept[index]
        open_parts = [index for index in open_parts if index not in full] if full else []
    return [max(1, each) for each in kept]


@configuration
class DEFT(CommonPositions):
    """Each rank selects in its own parts of the model; parts with large gradients send more.

    Every step, for all parameters (under FSDP2: of a module) together, on every rank:

    1. ``h = g + e``
    2. parameters larger than a quarter of a rank's share of the model are cut into equal parts
    3. rank ``step mod W`` sends the norms of its parts; the number of elements is split over parts by them
    4. in descending order of cost, ``size * log2(k)``, each part goes to the rank with the least cost so far
    5. each rank finds the largest elements of its parts exactly; all ranks get all positions
    6. every rank contributes its own h there; ``e' = h``, 0 there

    As with `ExDyna` no position is chosen twice, but counts are exact and selection costs a top-k of a W-th of the
    model. `ExDyna` and `ChunkTopK` are faster.

    Args:
        density: Share of the model's elements that is sent, in (0, 1].

    References:
        Yoon & Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
        Sparsification", 2023, arXiv 2307.03500. Written from the definition, not from the authors' code.
    """

    name: ClassVar[str] = "deft"
    title: ClassVar[str] = "deft"
    whole_model: ClassVar[bool] = True
    position_messages: ClassVar[int] = 2

    def positions(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        residuals = [state[view.spec.name]["residual"] for view in views]
        sizes, leader = [view.spec.numel for view in views], step.index % comm.world_size
        parts = parts_of(sizes, comm.world_size)
        norms = torch.stack([residuals[view][start:stop].norm() for view, start, stop in parts])
        yield comm.broadcast(norms, leader)
        assigned = assign_parts(
            sizes, norms.nan_to_num_(0.0, 0.0, 0.0).tolist(), self.density, comm.world_size, step.index
        )
        own = [top_k(residuals[p.view][p.start : p.stop], p.kept)[0].int() for p in assigned if p.rank == comm.rank]
        counts = [sum(part.kept for part in assigned if part.rank == rank) for rank in range(comm.world_size)]
        message = torch.zeros(max(counts), dtype=torch.int32, device=norms.device)
        if own:
            message[: counts[comm.rank]] = torch.cat(own)
        received = torch.empty(comm.world_size, max(counts), dtype=torch.int32, device=norms.device)
        yield comm.all_gather(received, message)
        taken = [0] * comm.world_size
        found: list[list[Tensor]] = [[] for _ in views]
        for part in assigned:
            at = taken[part.rank]
            found[part.view].append(received[part.rank, at : at + part.kept].long() + part.start)
            taken[part.rank] += part.kept
        return [torch.cat(each) for each in found]

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return _POSITION_NBYTES * -(-self.num_kept(spec) // world_size) * (world_size - 1)
