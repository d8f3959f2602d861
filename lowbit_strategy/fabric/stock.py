"""The framework's base classes of the strategies here.

Modules in this folder import it, and each other, relatively, because `lowbit_strategy.lightning_fabric` consists of the
same modules with a different `stock`.
"""

from lightning.fabric.strategies import DDPStrategy as DDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as ModelParallelStrategy
from lightning.fabric.strategies import ParallelStrategy as ParallelStrategy
