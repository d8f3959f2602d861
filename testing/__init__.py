"""What tests and benchmarks both stand on; it imports neither of them, and the wheel is without it.

`worlds` are ranks without processes, `processes` real ones, `hosts` real ones behind slow links. `training` has models
and their loops, `invariants` what every method must keep, `counting` counters of bytes, `kernels` and `cuda` cases for
the fast paths.
"""
