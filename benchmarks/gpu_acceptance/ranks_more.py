"""The other half of `ranks`: accumulation, checkpointing, levels, outer steps."""

from gpu_acceptance.ranks import MORE as CHECKS

__all__ = ["CHECKS"]
