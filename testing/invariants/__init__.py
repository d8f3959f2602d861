"""What every method must keep, as checks that run inside real processes: see `tests/integration/test_invariants.py`.

A case has two halves. `collect` runs on every rank, drives a `GradientSync` the way the frameworks do and returns what
it saw. `check` gets all ranks' evidence in one place and returns the failures as text. A method that raises fails its
own cases only: the ranks report, and go on with a fresh process group.
"""
