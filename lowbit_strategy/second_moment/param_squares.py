"""Statistics of the squares of one parameter's gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
KEPT = 0.75  # minimum weight of old statistics when new ones arrive
ENERGY_KEPT = 0.8
FLOOR = 0.01  # fraction of the block's mean


@dataclass(slots=True)
class ParamSquares:
    """A rank's sums since the last exchange, and the results of exchanges.

    Args:
        sums: This rank's squares since the window began, bfloat16 in the layout of the gradient's bucket; None: no
            window is open.
        decoded_sums: Mean squares of the decoded mean in the same steps, float32 ``[blocks]``.
        num_sums: Number of these steps, each with all its backward passes.
        age: Number of steps before `last_step` in which it was reduced.
        last_step: The last step in which it was reduced.
        gap: Steps since the previous exchange.
        exchanged: The step of the last exchange.
        squares: The ranks' mean, averaged over exchanges, bfloat16 ``[own elements]``.
        decoded: The decoded mean's squares, averaged in the same way, float32 ``[blocks]``.
        energies: The energy of the ranks' mean gradient and the mean of their energies, averaged in the same way,
            float32 ``[2]``.
        average: The value of `v` if it were equal for all elements of a block, float32 ``[blocks]``.
        pending: Squares, decoded squares and energies that were exchanged in this step, and the gap.
    """

    sums: Tensor | None = None
    decoded_sums: Tensor | None = None
    num_sums: int = 0
    age: int = -1
    last_step: int | None = None
    gap: int = 0
    exchanged: int | None = None
    squares: Tensor | None = None
    decoded: Tensor | None = None
    energies: Tensor | None = None
    average: Tensor | None = None
    pending: tuple[Tensor, Tensor, Tensor, int] | None = None

    def begin_pass(self, step: int) -> bool:
        """Whether this backward pass is the first in its step. The first one after an exchange opens a window."""
        if self.last_step == step:
            return False
        if self.exchanged is not None and self.exchanged == self.last_step:
            self.sums, self.decoded_sums, self.num_sums, self.gap = None, None, 0, 0
        self.age += 1
        self.gap += 1
        self.last_step = step
        return True

    def update(self, beta2: float) -> None:
        """Update statistics after the optimizer's step. Those that are not finite are ignored."""
        if self.pending is None:
            return
        squares, decoded, energies, gap = self.pending
        self.pending = None
        blocks = blocks_of(squares)
        squares = torch.maximum(blocks, FLOOR * blocks.mean(1, keepdim=True)).view(-1)[: squares.numel()]
        if self.squares is None or self.decoded is None or self.energies is None:
            self.squares = torch.zeros_like(squares, dtype=torch.bfloat16)
            self.decoded, self.energies = torch.zeros_like(decoded), torch.zeros_like(energies)
        is_usable = squares.isfinite().all() & decoded.isfinite().all() & energies.isfinite().all()
        for old, new, least in (
            (self.squares, squares, KEPT),
            (self.decoded, decoded, KEPT),
            (self.energies, energies, ENERGY_KEPT),
        ):
            kept = max(beta2**gap, least)
            old.copy_(torch.where(is_usable, kept * old.float() + (1 - kept) * new, old))


def blocks_of(x_N: Tensor) -> Tensor:
    """``[blocks, BLOCK]``, the last one filled up with zeros."""
    padding = -x_N.numel() % BLOCK
    return (F.pad(x_N, (0, padding)) if padding else x_N).view(-1, BLOCK)


def mean_squares(x_N: Tensor) -> Tensor:
    """float32 ``[blocks]``."""
    return torch.linalg.vector_norm(blocks_of(x_N), dim=1, dtype=torch.float32).square_().div_(BLOCK)
