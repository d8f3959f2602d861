"""Hugging Face Accelerate: a plugin for any `Accelerator`, and an `Accelerator` that takes one.

accelerator = Accelerator()
LowBitPlugin(LoCo(bits=4)).attach(accelerator)     # before accelerator.prepare

accelerator = LowBitAccelerator(lowbit_plugin=LowBitPlugin(LoCo(bits=4)))      # the same
"""

from lowbit_strategy.accelerate.binding import Binding, binding_of
from lowbit_strategy.accelerate.plugin import LowBitAccelerator, LowBitPlugin
from lowbit_strategy.telemetry.model_control import MonitorOptions

__all__ = ["Binding", "LowBitAccelerator", "LowBitPlugin", "MonitorOptions", "binding_of"]
