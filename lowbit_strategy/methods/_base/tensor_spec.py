"""What a method knows about a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lowbit_strategy.collectives.layout import Cut, Part, Share, cut_of

Role = Literal["embedding", "head", "other"]
MemoryOrder = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter: its name in the model, unsharded shape, what it is for, and how its elements lie in memory.

    Args:
        name: What the model calls it.
        shape: Unsharded.
        role: What it is for.
        memory_order: Dims from the outermost in memory to the innermost, as of ``channels_last``; None: in order. Flat
            gradients and residuals have their elements in this order.
        part: Where it lies in the parameter, if `shape` is that of a part only.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "other"
    memory_order: MemoryOrder = None
    part: Part | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def whole_numel(self) -> int:
        """Elements of the parameter that this is a part of, or of itself."""
        return math.prod(self.shape if self.part is None else self.part.shape)

    @property
    def whole(self) -> TensorSpec:
        """The parameter that this is a part of, or itself."""
        return self if self.part is None else replace(self, shape=self.part.shape, part=None)

    def shared(self, share: Share | None) -> TensorSpec:
        """The part of this parameter that `share` says; None: all of it."""
        if share is None:
            return self
        shape, part = share.part(self.shape, self.memory_order[0] if self.memory_order else 0)
        return replace(self, shape=shape, part=part)

    def cut(self, world_size: int, block_size: int, *, scatter: bool) -> Cut:
        """How it is cut over the ranks that reduce it."""
        row_numel = None if self.part is None else self.part.row_numel
        if scatter and row_numel is not None and row_numel * world_size >= self.numel:  # not where a rank tries alone
            return Cut(self.numel, row_numel, world_size)
        return cut_of(self.shape, world_size, block_size, scatter=scatter)


# Stands for a model's parameters where none is known yet. Big enough that headers and padding do not matter, and a
# matrix, so that low-rank methods compress it.
REFERENCE = TensorSpec("reference.weight", (1024, 1024))


def in_memory_order(values_N: Tensor, shape: Sequence[int], source: MemoryOrder, target: MemoryOrder) -> Tensor:
    """Flat values of a parameter of `shape`, brought from one memory order into another."""
    if source == target:
        return values_N
    dims = range(len(shape))
    source, target = tuple(dims) if source is None else source, tuple(dims) if target is None else target
    values = values_N.view([shape[dim] for dim in source])
    return values.permute([source.index(dim) for dim in target]).reshape(-1)
