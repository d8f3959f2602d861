"""MiCRO: exclusive partitions of equal size."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.sparse import SparseCompressor
from lowbit_strategy.methods.exdyna import ExclusiveReducer
from lowbit_strategy.options.configuration import configuration


@configuration
class MiCRO(SparseCompressor):
    """`ExDyna` with partitions of fixed size: simpler, but uneven where large gradients are close together.

    References:
        Yoon & Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
        Training", 2023, arXiv 2310.00967. From the definition, not from the authors' code.
    """

    name: ClassVar[str] = "micro"

    def reducer(self, spec: TensorSpec) -> Reducer:
        return ExclusiveReducer(density=self.density, codec=self.codec, adjust=False)
