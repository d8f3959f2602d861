"""Kernels that only the zoo's methods call."""
