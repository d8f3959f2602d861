"""AdaComp: in each bin, whatever this step could bring to the bin's largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.collectives.stateful_codec import State
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods._base.reducer import View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_reducer import SparseReducer, Values, value_codec
from lowbit_strategy.options.configuration import configuration

_SIGNS = BlockCodec(BlockFormat(bits=1, block_size=64, scale_rule="mean_abs", levels=(-1.0, 1.0)))
_EXPECTED_PER_BIN = 3  # of entries; what is really sent depends on the gradient


def select_in_bins(g: Tensor, gradient: Tensor, bin_size: int) -> Tensor:
    """Positions where ``|g + gradient|`` reaches the largest ``|g|`` of their bin, int64; none in a bin of zeros."""
    padding = -g.numel() % bin_size
    largest = torch.nn.functional.pad(g.abs(), (0, padding)).view(-1, bin_size).amax(1, keepdim=True)
    reach = torch.nn.functional.pad((g + gradient).abs(), (0, padding)).view(-1, bin_size)
    chosen = ((reach >= largest) & (largest > 0)).view(-1)[: g.numel()]
    return chosen.nonzero().view(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaCompReducer(SparseReducer):
    """Fields as in `AdaComp`; ``codec`` of the values."""

    codec: Codec
    bin_size: int

    @property
    def label(self) -> str:
        return f"adacomp, bins of {self.bin_size}"

    def num_kept(self, spec: TensorSpec) -> int:
        return min(spec.numel, _EXPECTED_PER_BIN * -(-spec.numel // self.bin_size))

    def choose(self, view: View, tensors: State, step: StepContext) -> Chosen:
        residual = tensors["residual"]
        indices = select_in_bins(residual, view.flat().float(), self.bin_size)
        return Chosen(indices, residual.index_select(0, indices))


@configuration
class AdaComp(Compressor):
    """Adaptive residual compression: the density follows from the gradient.

    Every step, for each parameter, on every rank:

    1. ``G = R + dW``, gradient plus residual; ``H = G + dW``
    2. in each bin of `bin_size` elements, those with ``|H| >= max |G|`` are sent, as signs with the mean magnitude of
       64 such neighbours
    3. ``R' = G - sent``
    4. the mean over ranks of what was sent, 0 where nobody sent

    Args:
        bin_size: Elements of a bin in matrices. Larger: fewer are sent.
        conv_bin_size: The same in tensors of three and more dims.
        values: How values travel: ``signs``, or as in `TopK`.
        exempt, high_precision: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training", 2018,
        arXiv 1712.02679, algorithm 2. There one magnitude serves a whole layer.
    """

    name: ClassVar[str] = "adacomp"
    approaches_mean: ClassVar[bool] = False

    bin_size: int = 500
    conv_bin_size: int = 50
    values: str | Codec = "signs"

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        for field in ("bin_size", "conv_bin_size"):
            size = getattr(self, field)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{field} must be a positive integer, got {size!r}")
        self._codec()

    def _codec(self) -> Codec:
        if self.values == "signs":
            return _SIGNS
        names: Values | Codec = self.values  # type: ignore[assignment]
        return value_codec(names)

    def method(self, spec: TensorSpec) -> AdaCompReducer:
        return AdaCompReducer(codec=self._codec(), bin_size=self.conv_bin_size if spec.ndim > 2 else self.bin_size)
