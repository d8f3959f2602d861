"""Optimizers that do not go with local steps."""

from __future__ import annotations

from typing import Any


def check_keeps_weights(optimizer: Any) -> None:
    """Steps are local: what ranks validate, save and end with are the anchors, which they share.

    Raises:
        ValueError: The optimizer, or one inside of it, puts other weights into the model for that: this rank's own.
    """
    inner: Any = optimizer
    while inner is not None:
        is_wrapper = type(inner).__module__.startswith("accelerate.")  # which has these methods for any optimizer
        if not is_wrapper and callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None)):
            raise ValueError(
                f"{type(inner).__name__} exchanges the model's weights in its train() and eval(), for this rank's own"
                " average, and local steps (outer=) put in what all ranks share: they do not go together. Leave outer"
                " out, or take an optimizer that keeps one set of weights, such as AdamW (in place of"
                " optim='schedule_free_adamw')"
            )
        inner = getattr(inner, "optimizer", None)
