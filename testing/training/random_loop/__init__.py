"""Random training loops: what scripts do with models, optimizers and sessions, told to PyTorch in several ways.

A `Program` (`space`) is drawn from a seed and a layout: how the model is set up, and a list of actions. An action
(`actions`) is a function: what it does is its text, and what must hold right after it is checked inside. A `Loop`
(`loop`) runs a program, and what derives from it (`ways`) tells the same loop to a framework. `compared` (`checks`)
says what must hold of runs that belong together.
"""

from testing.training.random_loop.checks import launched
from testing.training.random_loop.space import CONTROLLERS, LAYOUTS, Program

__all__ = ["CONTROLLERS", "LAYOUTS", "Program", "launched"]
