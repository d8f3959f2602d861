"""The framework's classes that the strategies and callbacks here derive from.

Modules of this folder import it, and each other, relatively: `lowbit_strategy.pytorch_lightning` consists of the same
modules, over a `stock` of its own.
"""

from lightning.pytorch.callbacks import Callback as Callback
from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
