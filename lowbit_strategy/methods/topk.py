"""Top-k: sends the largest elements of gradient plus residual."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods._base.positions import OwnPositions
from lowbit_strategy.options.configuration import configuration


@configuration
class TopK(OwnPositions):
    """Top-k sparsification with error feedback.

    Every step, for each parameter of n elements, on every rank:

    1. ``h = g + e``
    2. the ``k = max(1, round(density * n))`` largest ``|h|`` are sent with their positions; among equal ones the first
       are
    3. ``e' = h``, but where sent 0 or the codec's error
    4. the result is the mean over ranks of what was sent, and 0 where no rank sent

    DDP: one all-gather, traffic grows as k * W. FSDP2: each entry goes only to the owner of its row. `ChunkTopK` has
    messages of fixed size instead.

    References:
        Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", 2017, arXiv 1704.05021;
        Stich et al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599.
    """

    name: ClassVar[str] = "topk"
    same_counts: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"top-k {self.density:g}, {self.codec.label}"

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        return Chosen(*total.top_k(self.num_kept(view.spec)))
