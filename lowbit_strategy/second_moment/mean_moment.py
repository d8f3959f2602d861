"""Corrects Adam's second moment with local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.engine.transaction_listener import Follower
from lowbit_strategy.model.parameters import local_part
from lowbit_strategy.second_moment.correction import Correction
from lowbit_strategy.second_moment.optimizers import unsuitable


class NotExchanged(Follower):
    """Ranks exchange no squares."""

    @property
    def extra(self) -> Any:
        """Exchanges and memory, for plans."""
        return leaves.load("lowbit_strategy.second_moment.planned:NoSquares", "a plan")()


class MeanMoment(Correction, NotExchanged):
    """Corrects ``exp_avg_sq`` after every local step.

    Adam divides by the root of ``v``, the average of squared gradients. With local steps a rank sees a part of the
    batch: its noisier gradients have larger squares, and its steps are too small. With `W` ranks and a gradient `g` of
    mean `E` and variance `V`, synchronous training would have ``E**2 + V / W`` instead of ``E**2 + V``. The first
    moment ``m`` averages over ``k = (1 + beta1) / (1 - beta1)`` steps, so its square is ``E**2 + V / k``, and a mixture
    of both has the value of synchronous training:

    1. ``a = (1 / W - 1 / k) / (1 - 1 / k)``, or 0 if `W` is larger than `k`
    2. ``v += (1 - beta2) * (a * g**2 + (1 - a) * m**2 - g**2)``, with ``m`` divided by ``1 - beta1**step``

    It sends nothing and has no state. In the synchronous part of a rule gradients are means already.

    Args:
        num_ranks: Returns the number of ranks, or replicas, that take local steps now; 1: nothing is corrected.
    """

    def __init__(self, num_ranks: Callable[[], int]) -> None:
        self._num_ranks = num_ranks

    @torch.no_grad()
    def correct_(self, optimizer: Optimizer) -> None:
        """Scale exp_avg_sq as if `optimizer` had stepped on the mean of all ranks' gradients.

        Raises:
            ValueError: The optimizer is not of Adam's kind.
        """
        num_ranks = self._num_ranks()
        if num_ranks == 1:
            return
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            noise = (1 - beta1) / (1 + beta1)  # variance of the first moment, relative to a gradient's
            share = (1 / num_ranks - noise) / (1 - noise) if noise < 1 / num_ranks else 0.0
            for param in group["params"]:
                state = optimizer.state.get(param)
                if param.grad is None or not state:
                    continue
                if "exp_avg_sq" not in state:
                    raise ValueError(unsuitable(optimizer))
                m, v, g = (local_part(each) for each in (state["exp_avg"], state["exp_avg_sq"], param.grad))
                unbiased = m / (1 - beta1 ** state["step"])  # the step may be on the device: the host does not wait
                v.addcmul_(g, g, value=(1 - beta2) * (share - 1))
                v.addcmul_(unbiased, unbiased, value=(1 - beta2) * (1 - share))
