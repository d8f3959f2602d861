"""The kernels' implementations on this machine, one test for each."""

from testing.kernels.paths import isa as isa
from testing.kernels.paths import path as path
