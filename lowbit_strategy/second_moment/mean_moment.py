"""Corrects Adam's second moment with local steps, and checks which optimizers have one that can be corrected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.engine.transactions import Follower
from lowbit_strategy.model.parameters import local_part

_DECOUPLED = ("AdamW",)  # weight decay is not part of the gradient


class NotExchanged(Follower):
    """Ranks exchange no squares."""

    @property
    def extra(self) -> Any:
        """What ranks exchange and keep, for plans."""
        return leaves.load("lowbit_strategy.second_moment.planned:NoSquares", "a plan")()


class MeanMoment(NotExchanged):
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

    def stepped(self, optimizer: Optimizer) -> None:
        if has_stepped(optimizer):
            correct_(optimizer, self._num_ranks())


@torch.no_grad()
def correct_(optimizer: Optimizer, num_ranks: int) -> None:
    """Scale exp_avg_sq as if `optimizer` had stepped on the mean of `num_ranks` gradients.

    Raises:
        ValueError: The optimizer is not of Adam's kind.
    """
    if num_ranks == 1:
        return
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        noise = (1 - beta1) / (1 + beta1)  # of the first moment, in variances of a gradient
        share = (1 / num_ranks - noise) / (1 - noise) if noise < 1 / num_ranks else 0.0
        for param in group["params"]:
            state = optimizer.state.get(param)
            if param.grad is None or not state:
                continue
            if "exp_avg_sq" not in state:
                raise ValueError(unsuitable(optimizer))
            m, v, g = (local_part(each) for each in (state["exp_avg"], state["exp_avg_sq"], param.grad))
            unbiased = m / (1 - beta1 ** state["step"])  # may be on the device: the host does not wait
            v.addcmul_(g, g, value=(1 - beta2) * (share - 1))
            v.addcmul_(unbiased, unbiased, value=(1 - beta2) * (1 - share))


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether its step has changed anything, since fused optimizers skip a step that overflowed."""
    found = getattr(optimizer, "found_inf", None)  # set by a gradient scaler during the step
    return found is None or not bool(found)


def has_second_moment(optimizer: Optimizer) -> bool:
    """Whether it has a second moment that can be corrected. Call it after a step."""
    if any("betas" not in group or group.get("amsgrad") for group in optimizer.param_groups):
        return False
    states = [optimizer.state.get(param) for group in optimizer.param_groups for param in group["params"]]
    return all("exp_avg_sq" in state for state in states if state)  # no state: another optimizer steps the parameter


def check_second_moment(optimizer: Optimizer) -> None:
    """Check that the optimizer's second moment can be corrected. Called before it has stepped.

    Raises:
        ValueError: It has no second moment that could be corrected.
    """
    if any("betas" not in group or group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError(unsuitable(optimizer))


def unsuitable(optimizer: Optimizer) -> str:
    """The message that says what is wrong and what to do."""
    return (
        "second_moment=True needs an optimizer that keeps exp_avg_sq, such as AdamW, and without amsgrad, and"
        f" {type(optimizer).__name__} does not, or not so: leave second_moment out"
    )


def check_decay(optimizer: Optimizer) -> None:
    """Raises:
    ValueError: Its weight decay is part of the gradient, and would be missing from its square.
    """
    decoupled = type(optimizer).__name__ in _DECOUPLED
    for group in optimizer.param_groups:
        if group.get("weight_decay") and not (decoupled or group.get("decoupled_weight_decay")):
            raise ValueError(
                "second_moment=True with local steps needs a weight decay that is not part of the gradient, and"
                f" {type(optimizer).__name__} adds {group['weight_decay']} times the weights: take AdamW, or leave"
                " second_moment out"
            )
