"""The same as `lowbit_strategy.lightning` for the ``pytorch_lightning`` package, whose base classes are its own."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from lowbit_strategy.lightning.ddp import LowBitDDPMixin
from lowbit_strategy.lightning.fsdp import LowBitFSDPMixin

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy"]


class LowBitDDPStrategy(LowBitDDPMixin, DDPStrategy):
    """See `lowbit_strategy.lightning.LowBitDDPStrategy`."""


class LowBitFSDPStrategy(LowBitFSDPMixin, ModelParallelStrategy):
    """See `lowbit_strategy.lightning.LowBitFSDPStrategy`."""
