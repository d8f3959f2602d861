"""Kernels that only these methods call."""
