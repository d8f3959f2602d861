"""What the mixins derive from for the type checker: while a program runs, the classes of either Lightning namespace."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
else:
    DDPStrategy = ModelParallelStrategy = ParallelStrategy = object
    Callback = ABC
