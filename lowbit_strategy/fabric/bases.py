"""What the mixins derive from for the type checker: while a program runs, the classes of either Fabric namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
else:
    DDPStrategy = ModelParallelStrategy = ParallelStrategy = object
