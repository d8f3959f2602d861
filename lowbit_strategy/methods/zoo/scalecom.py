"""ScaleCom: all ranks send the positions that one of them chooses, in turns."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import POSITION_NBYTES, Chosen, counts_nbytes, layout_of
from lowbit_strategy.kernels.select import top_k
from lowbit_strategy.methods._base.positions import CommonPositions
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.options.configuration import configuration


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
        beta: Weight of the low-pass filter, in (0, 1]: 1 is plain error feedback; use 0.1 to 0.3 with large learning
            rates, which otherwise make the ranks' residuals diverge.

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
        return self.beta  # the residual is this times the unsent part

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
            raise RuntimeError(f"rank {leader} announces {sum(sizes_V)} positions, but all ranks send {count}")
        return layout.positions(counts_SK[0], sizes_V, wire)

    def update_residual_(self, view: ParamView, tensors: StateTensors, sent: Chosen) -> None:
        if self.beta == 1.0:
            CommonPositions.update_residual_(self, view, tensors, sent)
            return
        # The residual is h = m + g. It becomes h - beta * sent - (1 - beta) * g = m + beta * (g - sent).
        left = (sent.values - self.beta * sent.values).nan_to_num_(0.0, 0.0, 0.0)
        tensors["residual"].index_copy_(0, sent.indices, left)
        tensors["residual"].add_(view.flat(), alpha=self.beta - 1.0)

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        message = counts_nbytes(spec.numel) + POSITION_NBYTES * self.num_kept(spec)
        return message * (world_size - 1) // world_size
