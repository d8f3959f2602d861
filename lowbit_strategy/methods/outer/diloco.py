"""DiLoCo: local steps of any optimizer, and an outer optimizer with momentum; with fragments its streaming form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.options.configuration import configuration


@configuration
class DiLoCo(OuterRule):
    """An outer optimizer, SGD with Nesterov momentum by default, takes the mean pseudo-gradient as its gradient.

    Its streaming form has several `fragments`, a `delay` in which ranks train on while bytes travel, and a `mix` of
    each rank's own weights with the anchor.

    Args:
        every: Optimizer steps of a round; see `OuterRule`.
        lr: The outer optimizer steps with it. 1 with no momentum takes the mean of the weights.
        momentum: The outer optimizer has it, in [0, 1). More: faster, less steady.
        nesterov: Nesterov's momentum instead of the classic one.
        optimizer_class: Another outer optimizer: the name of a class of ``torch.optim``, or what makes an optimizer of
            the anchors when it is called with them and ``lr``. `momentum` and `nesterov` are then its own business.
        decay: How `lr` falls to zero over `num_steps` optimizer steps: ``"linear"``, ``"cosine"``, or ``"none"``. The
            inner optimizer's schedule falls as well, and each rank's movements with it: this comes on top.
        fragments, delay, mix, average_state: See `OuterRule`.
        synchronous, synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.

    Raises:
        ValueError: A field is out of range, or ``torch.optim`` has no such class.

    References:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv 2311.08105;
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512.
    """

    name: ClassVar[str] = "diloco"

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    optimizer_class: str | Callable[..., Any] = "SGD"
    decay: Literal["none", "linear", "cosine"] = "none"

    def __post_init__(self) -> None:
        OuterRule.__post_init__(self)
        if not self.lr > 0.0:
            raise ValueError(f"lr must be above 0, got {self.lr!r}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.decay != "none" and self.num_steps is None:
            raise ValueError(f"decay={self.decay!r} needs the length of the run, num_steps: lr reaches zero there")
        self._make  # noqa: B018 (checks the name)

    @property
    def _make(self) -> Callable[..., Any]:
        if not isinstance(self.optimizer_class, str):
            return self.optimizer_class
        found = getattr(torch.optim, self.optimizer_class, None)
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            raise ValueError(
                f"optimizer_class must be the name of a class of torch.optim such as 'SGD' or 'Adam', got"
                f" {self.optimizer_class!r}"
            )
        return found

    @property
    def moment_nbytes(self) -> float:
        if self.optimizer_class != "SGD":
            return super().moment_nbytes
        return 4.0 if self.momentum else 0.0

    def rate_factor(self, steps: float) -> float:
        if self.decay == "none" or self.num_steps is None:
            return 1.0
        share = min(1.0, steps / self.num_steps)
        return 1.0 - share if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))

    def optimizer(self, anchors: Sequence[Tensor]) -> Optimizer:
        if self.optimizer_class == "SGD":
            nesterov = self.nesterov and self.momentum > 0.0
            return torch.optim.SGD(anchors, lr=self.lr, momentum=self.momentum, nesterov=nesterov)
        made: Optimizer = self._make(anchors, lr=self.lr)
        return made
