"""The framework's base classes of the strategies and callbacks here.

Modules in this folder import it, and each other, relatively, because `lowbit_strategy.pytorch_lightning` consists of
the same modules with a different `stock`.
"""

from lightning.pytorch.callbacks import Callback as Callback
from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
