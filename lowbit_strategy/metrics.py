"""torchmetrics metrics of compression: the error of what was sent, and the bytes.

All states are sums with ``dist_reduce_fx="sum"``, in float64 or integers. Over several updates or ranks, the result is
that of all tensors together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = [
    "BitsPerElement",
    "CompressionCosineSimilarity",
    "CompressionGain",
    "CompressionRatio",
    "CompressionRelativeError",
    "ResidualNorm",
    "WireBytes",
]


class _Pair(Metric):
    """Sums of squares of the compensated gradient h, of what was sent, and of the difference; and of h times sent."""

    is_differentiable = False
    full_state_update = False

    compensated: Tensor
    sent: Tensor
    error: Tensor
    product: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("compensated", "sent", "error", "product"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, compensated: Tensor, sent: Tensor) -> None:
        """Add one tensor.

        Args:
            compensated: The gradient plus the residual, any shape.
            sent: What the other ranks decode; the same shape.

        Raises:
            ValueError: The shapes differ.
        """
        if compensated.shape != sent.shape:
            raise ValueError(
                f"compensated and sent must have one shape, got {tuple(compensated.shape)} and {tuple(sent.shape)}"
            )
        compensated, sent = compensated.detach().to(torch.float64), sent.detach().to(torch.float64)
        self.compensated += compensated.square().sum()
        self.sent += sent.square().sum()
        self.error += (compensated - sent).square().sum()
        self.product += (compensated * sent).sum()


class CompressionRelativeError(_Pair):
    """``||h - sent|| / ||h||`` with h the gradient plus the residual; 0 where the compensated gradient is zero.

    Example:
        >>> metric = CompressionRelativeError()
        >>> metric.update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
        >>> round(metric.compute().item(), 6)
        0.8
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        return torch.where(self.compensated == 0, self.compensated, (self.error / self.compensated).sqrt())


class CompressionCosineSimilarity(_Pair):
    """Cosine of the angle between h and what was sent; 1 where the compensated gradient is zero."""

    higher_is_better = True

    def compute(self) -> Tensor:
        norms = (self.compensated * self.sent).sqrt()
        return torch.where(norms == 0, torch.where(self.compensated == 0, 1.0, 0.0).to(norms), self.product / norms)


class CompressionGain(_Pair):
    """``||sent||^2 / ||h||^2``, the share of the energy that was sent; 1 where the compensated gradient is zero."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return torch.where(self.compensated == 0, torch.ones_like(self.compensated), self.sent / self.compensated)


class ResidualNorm(Metric):
    """Norm of residuals over all tensors of an update and all ranks; root mean square over updates.

    Example:
        >>> metric = ResidualNorm()
        >>> metric.update([torch.tensor([3.0]), torch.tensor([4.0])])
        >>> metric.compute().item()
        5.0
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    square: Tensor
    num_updates: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("square", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_updates", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, residuals: Tensor | list[Tensor]) -> None:
        """Add the residuals of one step on this rank: a tensor or a list of tensors."""
        parts = [residuals] if isinstance(residuals, Tensor) else residuals
        squares = (part.detach().to(torch.float64).square().sum() for part in parts)
        self.square += sum(squares, torch.zeros_like(self.square))
        self.num_updates += 1

    def compute(self) -> Tensor:
        return (self.square / self.num_updates.clamp(min=1)).sqrt()


class _Wire(Metric):
    """Bytes and elements as integers, summed over ranks."""

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
            numel: Elements that these bytes represent, counting every hop: an all-reduce of N elements over W ranks
                sends ``2 * (W - 1) / W * N``, a reduce-scatter half of that.

        Raises:
            ValueError: A number is negative.
        """
        if nbytes < 0 or numel < 0:
            raise ValueError(f"bytes and elements cannot be negative, got {int(nbytes)} and {int(numel)}")
        self.nbytes += int(nbytes)
        self.numel += int(numel)


class WireBytes(_Wire):
    """Bytes sent by all ranks together."""

    def compute(self) -> Tensor:
        return self.nbytes


class BitsPerElement(_Wire):
    """Bits on the wire per element and hop; NaN before the first update.

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
    """Bytes that float32 would take divided by bytes sent; NaN before the first update."""

    higher_is_better = True

    def compute(self) -> Tensor:
        return 4 * self.numel.double() / self.nbytes
