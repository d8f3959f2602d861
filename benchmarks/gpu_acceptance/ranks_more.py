"""The other half of `ranks`: accumulation, checkpointing, levels, outer steps."""

from benchmarks.gpu_acceptance.ranks import MORE as CHECKS

__all__ = ["CHECKS"]
