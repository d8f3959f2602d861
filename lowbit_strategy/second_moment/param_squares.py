"""What is known of the squares of one parameter's gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
KEPT = 0.75  # of what is known, at least, where there is something new
ENERGY_KEPT = 0.8
FLOOR = 0.01  # of the block's mean


@dataclass(slots=True)
class ParamSquares:
    """What a rank has added up since the last exchange, and what exchanges have shown.

    Args:
        sums: bfloat16, as the gradient in its bucket: own squares since the window began; None: none is open.
        decoded_sums: float32 ``[blocks]``: mean squares of the decoded mean in the same steps.
        num_sums: How many steps, each with all its backward passes.
        age: Steps in which it has been reduced before `last_step`.
        last_step: The last step in which it was reduced.
        gap: Steps since the exchange before.
        exchanged: The step of that.
        squares: bfloat16 ``[own elements]``: the ranks' mean, averaged over exchanges.
        decoded: float32 ``[blocks]``: the decoded mean's, averaged in the same way.
        energies: float32 ``[2]``: of the ranks' mean gradient, and the mean of theirs, likewise.
        average: float32 ``[blocks]``: what `v` would be of all elements of a block.
        pending: What has been exchanged in this step, squares, decoded and energies, and the gap.
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
        """The optimizer has stepped. Statistics that are not finite are ignored."""
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
