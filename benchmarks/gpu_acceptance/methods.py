"""Longer trainings with several methods beside uncompressed DDP."""

from benchmarks.gpu_acceptance.checks import Check
from benchmarks.gpu_acceptance.memory import methods_train

CHECKS = (Check(name="methods and a controller train beside uncompressed DDP", run=methods_train),)
