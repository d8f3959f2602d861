"""The door for what options bring that the rest does without: one shape for all of it.

| when | what is called |
|---|---|
| options are given | `check_options`, `check_layout` |
| a model is prepared | `check_model` |
| it is attached | `on_ranks`, `check_meshes`, `fitted`, `extra`, `attach` |
| optimizers are known | `check_optimizer` |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.param_groups import ModuleLayout
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.ranks.ranks import Ranks

_log = logging.getLogger("lowbit_strategy")


class Part:
    """What an option brings. It does nothing: a part overrides what concerns it.

    `options` are `SyncOptions`, `prepared` is a `PreparedModel`. What starts with ``check`` raises a ValueError if
    something does not go together.
    """

    def check_options(self, options: Any) -> None:
        """Check it against the other options."""

    def check_layout(self, options: Any, *, scatter: bool) -> None:
        """Check it against FSDP2 (`scatter`) or DDP."""

    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        """Check it against these parameters and their compressor."""

    def check_meshes(self, prepared: Any, meshes: Sequence[Ranks]) -> None:
        """Check it against a model with parameters on several meshes, such as experts. `meshes`: the ranks of each."""

    def on_ranks(self, prepared: Any) -> Any:
        """`prepared` on the ranks that there are.

        Raises:
            ValueError: It is not possible there.
        """
        return prepared

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check it against an optimizer that has not stepped yet."""

    def fitted(self, prepared: Any, ranks: Ranks, device: torch.device, modules: Mapping[str, ModuleLayout]) -> Any:
        """`prepared` adjusted to what there is, the same on every rank. `modules`: what FSDP2 gathers as one.

        Raises:
            ValueError: Nothing fits.
        """
        return prepared

    def extra(self, prepared: Any) -> Extra | None:
        """What ranks will exchange and keep for it; None: nothing."""
        return None

    def given_up(self) -> Part:
        """What is left if it cannot be had and nobody has asked for it."""
        return self

    def attach(self, sync: GradientSync, module: nn.Module, prepared: Any) -> None:
        """Begin; there are several ranks."""


def made_parts(options: Any) -> list[Part]:
    """The parts that options bring, asked for or not.

    Raises:
        MissingPart: One was asked for, and is not installed.
    """
    asked = {option: getattr(options, option) for option in leaves.OPTIONS}
    for option, part in leaves.OPTIONS.items():
        if asked[option]:
            leaves.need(part.target, option)
    present = {option: part.target for option, part in leaves.OPTIONS.items() if leaves.is_present(part.target)}
    return [leaves.load(target, option)(options) for option, target in present.items() if ":" in target]


def warn_of_missing_parts(options: Any) -> None:
    """Log what is not done because its part is not installed, though nobody has turned it off."""
    for option, part in leaves.OPTIONS.items():
        if part.unasked and getattr(options, option) is None and not leaves.is_present(part.target):
            _log.warning("%s", leaves.undone(option))
