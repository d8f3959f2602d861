"""The framework's classes that the strategies here derive from.

Modules of this folder import it, and each other, relatively: `lowbit_strategy.lightning_fabric` consists of the same
modules, over a `stock` of its own.
"""

from lightning.fabric.strategies import DDPStrategy as DDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as ModelParallelStrategy
from lightning.fabric.strategies import ParallelStrategy as ParallelStrategy
