"""What a method knows about a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal["embedding", "head", "other"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter: its name in the model, unsharded shape, and what it is for."""

    name: str
    shape: tuple[int, ...]
    role: Role = "other"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)


# Stands for a model's parameters where none is known yet. Big enough that headers and padding do not matter, and a
# matrix, so that low-rank methods compress it.
REFERENCE = TensorSpec("reference.weight", (1024, 1024))
