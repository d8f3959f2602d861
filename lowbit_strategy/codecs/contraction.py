"""What a code does to some blocks: whether it shrinks what it has not sent, and whether zeros stay zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_SEED = 0x5EED


def contracts(decoded: Callable[[Tensor], Tensor], block_size: int) -> bool:
    """Whether ``|x - C(x)| < |x|`` held for each of some blocks that are hard for one code or another.

    Otherwise a residual of such a block would grow with every step. True is no proof; False is one.

    Args:
        decoded: C, for float32 of `block_size` elements.
        block_size: Elements that are coded together.
    """
    for x in hard_blocks(block_size):
        error = (x.double() - decoded(x).double()).square().sum()
        if not error < x.double().square().sum():
            return False
    return True


def keeps_zeros(decoded: Callable[[Tensor], Tensor], block_size: int) -> bool:
    """Whether every third element of a block, the only ones that are zero, stays zero.

    Args:
        decoded: What the code makes of float32 of `block_size` elements.
        block_size: Elements that are coded together.
    """
    x = torch.randn(block_size, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    x[1::3] = 0.0
    return not bool(decoded(x)[1::3].any())


def hard_blocks(block_size: int) -> Iterator[Tensor]:
    """float32 [block_size]: one element alone, alone in noise, all alike, alternating, Gaussian, heavy tails."""
    noise = torch.randn(block_size, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    index = torch.arange(block_size, dtype=torch.float32)
    alone = (index == block_size // 2).float()
    yield alone
    yield -alone
    yield alone + 0.01 * noise
    yield torch.ones_like(index)
    yield 1.0 - 2.0 * (index % 2)
    yield index + 1.0
    yield noise
    yield noise.pow(5)
    yield torch.exp2(-(index % 100))
