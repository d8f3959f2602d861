"""Top-k: the largest elements of gradient plus residual."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StateTensors, StepContext
from lowbit_strategy.codecs.chunk import ChunkTopK
from lowbit_strategy.codecs.rotated import RotatedCodec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods._base.feedback import FeedbackCodec, FeedbackReducer, check_decay
from lowbit_strategy.methods._base.method import CodecPair, Method
from lowbit_strategy.methods._base.positions import OwnPositions
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.sparse_residuals import num_kept
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredReducer(Reducer):
    """The mean of what all ranks' messages decode to.

    1. every rank encodes its gradient
    2. one all-gather of bytes: each rank sends W - 1 times what a message has
    3. every rank decodes all messages and adds them in rank order

    Args:
        codec: Codec of a whole parameter.
    """

    codec: Codec

    fixed_size: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"{self.codec.label}, gathered"

    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        return self.codec.keeps_zeros

    def nearest(self) -> GatheredReducer:
        return GatheredReducer(codec=self.codec.nearest())

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        wires = []
        for view in views:
            g_N = view.flat().float()
            wires.append(self.codec.encode(g_N, seed=step.seed ^ zlib.crc32(view.spec.name.encode())))
            if view.compensated is not None:
                view.compensated.copy_(g_N)
        message = torch.cat(wires)
        received_WB = message.new_empty(comm.world_size, message.numel())
        yield comm.all_gather(received_WB, message)
        for view, wire_WB in zip(views, received_WB.split([wire.numel() for wire in wires], dim=1), strict=True):
            mean_N = self._decode(wire_WB, view.spec.numel) / comm.world_size
            if view.sent is not None:
                view.sent.copy_(self._decode(wire_WB[comm.rank, None], view.spec.numel))
            view.write_mean_(mean_N, comm.rank)

    def _decode(self, wire_WB: Tensor, numel: int) -> Tensor:
        return self.codec.decode_sum(wire_WB.contiguous(), numel)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 1

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return (world_size - 1) * self.codec.wire_nbytes(spec.numel)


SelectionKind = Literal["exact", "chunk"]


@configuration
class TopK(OwnPositions):
    """Top-k sparsification with error feedback.

    Every step, for each parameter of n elements, on every rank:

    1. ``h = g + e``
    2. the ``k = max(1, round(density * n))`` largest ``|h|`` are sent with their positions; of equal ones the first
    3. ``e' = h``, 0 where sent (or the codec's error)
    4. the mean over ranks of what was sent, 0 where no rank sent

    DDP: one all-gather, traffic grows as k * W. FSDP2: each entry goes only to the owner of its row.

    ``selection="chunk"`` takes the same number of elements from every 4,096. All sizes are then fixed: no counts
    travel, positions take 12 bits, and the host never waits for the GPU. As with quantizers each owner adds up its
    part; under DDP it sends back as many of every 4,096 means, the largest, and keeps the rest in its own residual, so
    traffic does not grow with W.

    With `decay` below 1 step 3 is ``e' = decay * h``, 0 where sent: DeMo's rule, in which h is a momentum and its
    largest elements are sent and removed.

    Args:
        selection: ``exact``: the k largest of the parameter; ``chunk``: of every 4,096 elements, which is coarser,
            since gradients differ between rows, but faster, and never waits for the GPU.
        cosines: With ``chunk``, take the largest coefficients of a discrete cosine transform of this many consecutive
            elements, a power of two; None: no transform. With `decay` and `gather` this is DeMo, without its
            two-dimensional transform and its optimizer's sign.
        gather: With ``chunk``, send every message to all ranks instead of an owner: nothing is selected or coded twice,
            but traffic grows with W. Fewer bytes for few elements on few ranks.
        decay: With ``chunk``, the factor of the residual per step, in (0, 1].

    References:
        Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", 2017, arXiv 1704.05021;
        Stich et al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599; `decay`: Peng, Quesnelle, Kingma, "DeMo:
        Decoupled Momentum Optimization", 2024, arXiv 2411.19870.
    """

    name: ClassVar[str] = "topk"
    same_counts: ClassVar[bool] = True

    selection: SelectionKind = "exact"
    cosines: int | None = None
    gather: bool = False
    decay: float = 1.0

    def __post_init__(self) -> None:
        OwnPositions.__post_init__(self)
        if self.cosines is not None and self.selection != "chunk":
            raise ValueError(f"cosines need selection='chunk', got selection={self.selection!r}")
        if self.cosines is not None:
            self._chunks()  # checks the size
        if self.gather and self.selection == "exact":
            raise ValueError("gather=True needs selection='chunk': the exact selection gathers anyway")
        if self.gather and self.residual != "float32":
            raise ValueError(f"gather=True keeps its residual in float32, got residual={self.residual!r}")
        check_decay(self.decay)
        if self.decay < 1.0 and self.selection == "exact":
            raise ValueError("decay needs selection='chunk': the exact selection keeps all of its residual")

    @property
    def label(self) -> str:
        return f"top-k {self.density:g}, {self.codec.label}"

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        return Chosen(*total.top_k(num_kept(self.density, view.spec.numel)))

    def method(self, spec: TensorSpec) -> Method:
        if self.selection == "exact":
            return self
        if self.gather:
            return FeedbackReducer(inner=GatheredReducer(codec=self._chunks()), decay=self.decay)
        return CodecPair(FeedbackCodec(codec=self._chunks(), residual=self.residual, decay=self.decay))

    def _chunks(self) -> Codec:
        codec = ChunkTopK(self.density, self.codec)
        return codec if self.cosines is None else RotatedCodec(codec, self.cosines, "cosine")
