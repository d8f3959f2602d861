"""The same as `lowbit_strategy.fabric` for the ``lightning_fabric`` package, which has other base classes.

Its modules are the files of that folder, imported again, but with this folder's `stock`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

__all__ = ["LowBitDDPStrategy", "LowBitFSDPStrategy", "adapt", "monitor"]

__path__.append(str(Path(__file__).parents[1] / "fabric"))

if TYPE_CHECKING:  # type checkers do not follow __path__: to them the classes are of both packages
    from lowbit_strategy.fabric import LowBitDDPStrategy as DDP
    from lowbit_strategy.fabric import LowBitFSDPStrategy as FSDP
    from lowbit_strategy.fabric import adapt, monitor
    from lowbit_strategy.lightning_fabric.stock import DDPStrategy, ModelParallelStrategy

    class LowBitDDPStrategy(DDP, DDPStrategy): ...

    class LowBitFSDPStrategy(FSDP, ModelParallelStrategy): ...
else:
    from .adapt import adapt, monitor
    from .strategies import LowBitDDPStrategy, LowBitFSDPStrategy
