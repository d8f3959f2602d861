"""Optimizers that step other optimizers."""

from __future__ import annotations

from typing import Any

import torch


class Lookahead(torch.optim.Optimizer):
    """Steps `inner`, and every second time goes half of the way back (Zhang et al. 2019, arXiv:1907.08610)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.num_steps = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for slow, param in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                param.copy_(slow.lerp_(param, 0.5))
        return result
