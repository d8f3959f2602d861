"""The framework's base classes of strategies and callbacks; see `lowbit_strategy.lightning.stock`."""

from pytorch_lightning.callbacks import Callback as Callback
from pytorch_lightning.strategies import DDPStrategy as DDPStrategy
from pytorch_lightning.strategies import ModelParallelStrategy as ModelParallelStrategy
from pytorch_lightning.strategies import ParallelStrategy as ParallelStrategy
