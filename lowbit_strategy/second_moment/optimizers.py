"""Checks whether optimizers have a second moment that can be corrected."""

from __future__ import annotations

from torch.optim import Optimizer

_DECOUPLED = ("AdamW",)  # weight decay is not part of the gradient


def has_second_moment(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a second moment that can be corrected. Call it after a step."""
    if _is_unlike_adam(optimizer):
        return False
    states = [optimizer.state.get(param) for group in optimizer.param_groups for param in group["params"]]
    return all("exp_avg_sq" in state for state in states if state)  # no state: another optimizer steps the parameter


def check_second_moment(optimizer: Optimizer, *, local_steps: bool) -> None:
    """Check that the optimizer's second moment can be corrected. Called before it has stepped.

    Raises:
        ValueError: It has no second moment that could be corrected, or `local_steps`: its weight decay is part of the
            gradient, and would be missing from its square.
    """
    if _is_unlike_adam(optimizer):
        raise ValueError(unsuitable(optimizer))
    decoupled = type(optimizer).__name__ in _DECOUPLED
    for group in optimizer.param_groups:
        if local_steps and group.get("weight_decay") and not (decoupled or group.get("decoupled_weight_decay")):
            raise ValueError(
                "second_moment=True with local steps needs a weight decay that is not part of the gradient, and"
                f" {type(optimizer).__name__} adds {group['weight_decay']} times the weights: use AdamW, or leave"
                " second_moment out"
            )


def _is_unlike_adam(optimizer: Optimizer) -> bool:
    return any("betas" not in group or group.get("amsgrad") for group in optimizer.param_groups)


def unsuitable(optimizer: Optimizer) -> str:
    """The message for an unsuitable optimizer."""
    return (
        "second_moment=True needs an optimizer that keeps exp_avg_sq, such as AdamW, and without amsgrad, and"
        f" {type(optimizer).__name__} does not, or not so: leave second_moment out"
    )
