"""Longer trainings with several methods beside uncompressed DDP."""

from gpu_acceptance.checks import Check
from gpu_acceptance.memory import methods_train

CHECKS = (Check(name="methods and a controller train beside uncompressed DDP", run=methods_train),)
