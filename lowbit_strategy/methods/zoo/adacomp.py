"""AdaComp: sends, in each bin, the elements that another gradient like this one would raise to the bin's largest."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StateTensors, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.sparse_values import value_codec
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods._base.positions import OwnPositions
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration

_SIGNS = BlockCodec(BlockFormat(bits=1, block_size=64, scale_rule="mean_abs", codebook=(-1.0, 1.0)))
_MOST = 4  # at most this many times the expected count


def expected_per_bin(bin_size: int) -> int:
    """Elements of a bin that are sent per step: about log2 of its size, measured with normal, Laplacian and heavier
    gradients. The first steps, and constant gradients, send several times more.
    """
    return max(1, round(math.log2(bin_size)))


def select_in_bins(g: Tensor, gradient: Tensor, bin_size: int, most: int) -> Tensor:
    """Positions where ``|g + gradient|`` reaches the largest ``|g|`` of their bin, int64; none in a bin of zeros.

    Args:
        g: Gradient plus residual, float32 [N].
        gradient: float [N].
        bin_size: Elements of a bin.
        most: Most positions per bin; if there are more, those with the largest ``|g + gradient|`` are taken, among
            equal ones the first.
    """
    padding = -g.numel() % bin_size
    largest = torch.nn.functional.pad(g.abs(), (0, padding)).view(-1, bin_size).amax(1, keepdim=True)
    reach = torch.nn.functional.pad((g + gradient).abs(), (0, padding)).view(-1, bin_size)
    chosen = (reach >= largest) & (largest > 0)
    full = (chosen.sum(1) > most).nonzero().view(-1)
    order = reach[full].argsort(dim=1, descending=True, stable=True)[:, :most]
    chosen[full] = torch.zeros_like(chosen[full]).scatter_(1, order, True)
    return chosen.view(-1)[: g.numel()].nonzero().view(-1)


@configuration
class AdaComp(OwnPositions):
    """Adaptive residual compression: the density follows from the gradient.

    Every step, for each parameter, on every rank:

    1. ``G = R + dW``, gradient plus residual; ``H = G + dW``
    2. in each bin of `bin_size` elements, those with ``|H| >= max |G|`` are sent, as signs with the mean magnitude of
       64 such neighbors; at most ``4 log2(bin_size)`` per bin, those with the largest ``|H|``
    3. ``R' = G - sent``
    4. the mean over ranks of what was sent, 0 where no rank sent

    Args:
        bin_size: Elements per bin in matrices. Larger: fewer are sent.
        conv_bin_size: The same for tensors of three or more dims.
        values: How values travel: ``signs``, or as in `TopK`.
        residual: See `TopK`.

    References:
        Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training", 2018,
        arXiv 1712.02679, algorithm 2. There one magnitude is used for a whole layer, and counts have no bound.
    """

    name: ClassVar[str] = "adacomp"
    density: ClassVar[float] = 1.0  # type: ignore[misc]  # no option: it follows from the gradient

    bin_size: int = 500
    conv_bin_size: int = 50
    values: str | Codec = "signs"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        OwnPositions.__post_init__(self)
        check_positive("bin_size", self.bin_size)
        check_positive("conv_bin_size", self.conv_bin_size)
        assert self.codec  # checks `values`

    @property
    def codec(self) -> Codec:
        return _SIGNS if self.values == "signs" else value_codec(self.values)

    @property
    def label(self) -> str:
        return f"adacomp, bins of {self.bin_size} and {self.conv_bin_size}"

    def bin_size_of(self, spec: TensorSpec) -> int:
        return self.conv_bin_size if spec.ndim > 2 else self.bin_size

    def num_kept(self, spec: TensorSpec) -> int:
        bin_size = self.bin_size_of(spec)
        return min(spec.numel, expected_per_bin(bin_size) * -(-spec.numel // bin_size))

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        residual = total.formed()
        bin_size = self.bin_size_of(view.spec)
        indices = select_in_bins(residual, view.flat().float(), bin_size, _MOST * expected_per_bin(bin_size))
        return Chosen(indices, residual.index_select(0, indices))
