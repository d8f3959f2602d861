"""The framework's base classes of strategies; see `lowbit_strategy.fabric.stock`."""

from lightning_fabric.strategies import DDPStrategy as DDPStrategy
from lightning_fabric.strategies import ModelParallelStrategy as ModelParallelStrategy
from lightning_fabric.strategies import ParallelStrategy as ParallelStrategy
