"""What configurations of sparse methods have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.compact_residual import ResidualDtype, compact
from lowbit_strategy.methods._sparse_base.sparse_reducer import Values, check_density, value_codec
from lowbit_strategy.options.configuration import configuration


@configuration
class SparseCompressor(Compressor):
    """Configurations of sparse methods.

    Args:
        density: Share of the elements that is sent, in (0, 1]. Smaller: fewer bytes, staler elements.
        values: How values travel: ``float32``, ``bfloat16``, ``int8`` to ``int2`` (blocks with a scale) or any codec.
            What a coarser one leaves out stays in the residual. A position costs 2 bytes besides.
        residual: ``float32``: 4 bytes per parameter on every rank; ``bfloat16``: 2; ``int8``: 1, with a scale per 128
            elements. The smaller ones round at random: what they add on average is nothing, but noise.
    """

    is_sparse: ClassVar[bool] = True
    approaches_mean: ClassVar[bool] = False  # not in as few steps as the shared tests take

    density: float = 0.01
    values: Values | Codec = "float32"
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_density(self.density)

    @property
    def codec(self) -> Codec:
        """Encodes the values."""
        return value_codec(self.values)

    @abstractmethod
    def reducer(self, spec: TensorSpec) -> Reducer:
        """The method of a parameter, with its residual in float32."""

    def method(self, spec: TensorSpec) -> Method:
        return compact(self.reducer(spec), self.residual)

    def conserving(self) -> SparseCompressor:
        return replace(self, residual="float32")
