"""The same as `lowbit_strategy.lightning` for the ``pytorch_lightning`` package, which has other base classes.

Its modules are the files of that folder, imported again, but with this folder's `stock`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

__all__ = ["AdaptiveCompression", "CompressionMonitor", "LowBitDDPStrategy", "LowBitFSDPStrategy"]

__path__.append(str(Path(__file__).parents[1] / "lightning"))

if TYPE_CHECKING:  # type checkers do not follow __path__: to them the classes are of both packages
    from lowbit_strategy.lightning import AdaptiveCompression as Adaptive
    from lowbit_strategy.lightning import CompressionMonitor as Monitor
    from lowbit_strategy.lightning import LowBitDDPStrategy as DDP
    from lowbit_strategy.lightning import LowBitFSDPStrategy as FSDP
    from lowbit_strategy.pytorch_lightning.stock import Callback, DDPStrategy, ModelParallelStrategy

    class LowBitDDPStrategy(DDP, DDPStrategy): ...

    class LowBitFSDPStrategy(FSDP, ModelParallelStrategy): ...

    class CompressionMonitor(Monitor, Callback): ...

    class AdaptiveCompression(Adaptive, Callback): ...
else:
    from .callbacks import AdaptiveCompression, CompressionMonitor
    from .strategies import LowBitDDPStrategy, LowBitFSDPStrategy
