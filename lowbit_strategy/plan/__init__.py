"""The messages and bytes that a configuration sends, computed only here; and the start-up report.

A `StepPlan` is computed from compressor, weights, parameters, sharding and ranks. It needs no process group and no
memory, so it can be made for any model on any number of ranks. In training its bytes are compared with those that are
sent. Dry runs, the advisor and the fitting to memory use plans; the core works without them.
"""
