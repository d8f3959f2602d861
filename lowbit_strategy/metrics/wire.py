"""Metrics of bytes: what was put on the wire, for how many elements, against what would have been."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class _Wire(Metric):
    """Bytes and elements, integers that do not round; summed over ranks."""

    is_differentiable = False
    full_state_update = False

    nbytes: Tensor
    numel: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("nbytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("numel", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nbytes: int | Tensor, numel: int | Tensor = 0) -> None:
        """Add one message or step.

        Args:
            nbytes: Bytes that this rank sent.
            numel: Elements that they stand for, every hop counted: an all-reduce of N elements over W ranks sends
                ``2 * (W - 1) / W * N``, a reduce-scatter half of that.

        Raises:
            ValueError: A negative number.
        """
        if nbytes < 0 or numel < 0:
            raise ValueError(f"bytes and elements cannot be negative, got {int(nbytes)} and {int(numel)}")
        self.nbytes += int(nbytes)
        self.numel += int(numel)


class WireBytes(_Wire):
    """Bytes sent, all ranks together."""

    def compute(self) -> Tensor:
        return self.nbytes


class BitsPerElement(_Wire):
    """Bits on the wire for one element and hop; NaN before the first update.

    Example:
        >>> metric = BitsPerElement()
        >>> metric.update(nbytes=66, numel=128)
        >>> metric.compute().item()
        4.125
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        return 8 * self.nbytes.double() / self.numel


class CompressionRatio(_Wire):
    """How many times fewer bytes than float32 would have taken; NaN before the first update."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return 4 * self.numel.double() / self.nbytes
