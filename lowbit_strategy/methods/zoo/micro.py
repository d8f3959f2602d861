"""MiCRO: exclusive partitions of fixed size."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.options.configuration import configuration


@configuration
class MiCRO(ExDyna):
    """`ExDyna` with partitions of fixed size: simpler, but uneven where large gradients are close together.

    References:
        Yoon & Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
        Training", 2023, arXiv 2310.00967. Written from the definition, not from the authors' code.
    """

    name: ClassVar[str] = "micro"
    balances: ClassVar[bool] = False
