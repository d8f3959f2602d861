"""The door for what goes along with gradients to the optimizers' steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.plan.extra import Extra


class Companion:
    """Nothing. What an option brings that follows optimizers derives from this."""

    def check_options(self, options: Any) -> None:
        """Raises:
        ValueError: `options` (`SyncOptions`) do not go with it.
        """

    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        """Raises:
        ValueError: The compressor does not go with it, for these parameters.
        """

    def check_ranks(self, prepared: Any) -> None:
        """Raises:
        ValueError: It does not suit the ranks of a `PreparedModel`.
        """

    def check_optimizer(self, options: Any, optimizer: Optimizer) -> None:
        """Checks an optimizer before it has stepped.

        Raises:
            ValueError: It cannot be followed.
        """

    def planned(self, prepared: Any) -> Extra:
        """What ranks will exchange for it, of a `PreparedModel`."""
        return Extra()

    def given_up(self) -> Companion:
        """What is left if there is no memory for it."""
        return self

    def attach(self, sync: GradientSync, module: nn.Module, prepared: Any) -> None:
        """Begin; there are several ranks."""


def companion_of(options: Any) -> Companion:
    """The companion that `SyncOptions` asks for."""
    target = "lowbit_strategy.second_moment.option:SecondMomentOption"
    if not options.second_moment and not leaves.is_present(target):
        return Companion()
    made: Companion = leaves.load(target, "second_moment")(options.second_moment)
    return made
