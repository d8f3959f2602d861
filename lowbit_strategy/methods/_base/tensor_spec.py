"""What the layers above tell a method about a parameter."""

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
