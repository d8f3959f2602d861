"""Floats that are sent as they are, in C: for these functions a format like the others."""

from lowbit_strategy.kernels.native.blocks import decode_sum_, encode_

__all__ = ["decode_sum_", "encode_"]
