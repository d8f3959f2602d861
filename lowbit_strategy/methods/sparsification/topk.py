"""Top-k: the largest elements of gradient plus residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.collectives.stateful_codec import State
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.select import top_k
from lowbit_strategy.methods._base.reducer import View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_reducer import SparseCompressor, SparseReducer, value_codec
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKReducer(SparseReducer):
    """Exact top-k of each parameter. Fields as in `TopK`."""

    density: float
    codec: Codec
    same_counts: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"top-k {self.density:g}, {self.codec.label}"

    def choose(self, view: View, tensors: State, step: StepContext) -> Chosen:
        return Chosen(*top_k(tensors["residual"], self.num_kept(view.spec)))


@configuration
class TopK(SparseCompressor):
    """Top-k sparsification with error feedback.

    Every step, for each parameter of n elements, on every rank:

    1. ``h = g + e``
    2. the ``k = max(1, round(density * n))`` largest ``|h|`` are sent with their positions; of equal ones the first
    3. ``e' = h``, 0 where sent (or what the codec did not say)
    4. the mean over ranks of what was sent, 0 where nobody sent

    DDP: one all-gather, traffic grows as k * W. FSDP2: each entry goes only to the owner of its row.

    Args:
        density: Share of each parameter's elements that is sent, in (0, 1]. Smaller: fewer bytes, staler elements.
        values: How they travel: ``float32``, ``bfloat16``, ``int8``, ``int4`` (blocks with a scale) or any codec. What
            a coarser one does not say stays in the residual.
        exempt, high_precision: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", 2017, arXiv 1704.05021;
        Stich et al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599.
    """

    name: ClassVar[str] = "topk"

    def method(self, spec: TensorSpec) -> TopKReducer:
        return TopKReducer(density=self.density, codec=value_codec(self.values))
