"""The interface of optional parts: what an option outside the core may do, and when.

| when | what is called |
|---|---|
| options are given | `check_options`, `check_wrapper` |
| a model is prepared | `check_model` |
| it is attached | `on_ranks`, `on_meshes`, `fitted`, `attach` |
| optimizers are known, or step | `check_optimizer` |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.attach.pace import Pace
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.ranks.ranks import Ranks

_log = logging.getLogger("lowbit_strategy")


class Part:
    """What an option adds. These methods do nothing; a part overrides those that it needs.

    `options` are `SyncOptions`, `prepared` is a `PreparedModel`. Methods that start with ``check`` raise a ValueError
    if things are incompatible.

    Attributes:
        in_rounds: Whether this option makes ranks meet in rounds, with separate steps in between.
    """

    in_rounds: ClassVar[bool] = False

    def check_options(self, options: Any) -> None:
        """Check this option against the others."""

    def check_wrapper(self, options: Any, *, scatter: bool) -> None:
        """Check that it supports FSDP2 (`scatter`) or DDP."""

    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        """Check it against these parameters and their compressor."""

    def on_ranks(self, prepared: Any) -> Any:
        """Adapt `prepared` to the actual ranks.

        Raises:
            ValueError: It cannot run on these ranks.
        """
        return prepared

    def on_meshes(self, prepared: Any, module: nn.Module, meshes: Sequence[Ranks]) -> Any:
        """Adapt `prepared` once groups have been made. `meshes`: the ranks of each mesh that has parameters; some, such
        as experts, may be on a different one.

        Raises:
            ValueError: It is not possible there.
        """
        return prepared

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check it against an optimizer."""

    def fitted(self, prepared: Any, ranks: Ranks, device: torch.device, modules: Mapping[str, ModuleLayout]) -> Any:
        """Return `prepared` fitted to the machine, the same on every rank. `modules`: the parameters that FSDP2 gathers
        together.

        Raises:
            ValueError: Nothing fits.
        """
        return prepared

    def attach(self, sync: GradientSync, module: nn.Module, prepared: Any) -> Pace | None:
        """Begin, if there are several ranks. Return the object that decides when they meet, if this part has one."""

    def adapter(self, framework: str) -> Any:
        """A module with additional functions for the adapter of that name; None: there is none."""
        return None


def made_parts(options: Any) -> list[Part]:
    """The parts that options add, whether the user asked for them or not.

    Raises:
        MissingPart: The user asked for a part that is not installed.
    """
    for option, part in leaves.PARTS.items():
        if getattr(options, option, None) and not _is_unchosen(options, option):
            leaves.need(part.target, option)
    present = {option: part.target for option, part in leaves.PARTS.items() if leaves.is_present(part.target)}
    return [leaves.load(target, option)(options) for option, target in present.items()]


def _is_unchosen(options: Any, option: str) -> bool:
    return bool(getattr(options, option, None) == getattr(type(options), option, None))


def warn_of_missing_parts(options: Any) -> None:
    """Log which features are missing because their part is not installed, unless the user has turned them off."""
    for option, part in leaves.PARTS.items():
        if part.unasked and _is_unchosen(options, option) and not leaves.is_present(part.target):
            _log.warning("%s", part.warning)
