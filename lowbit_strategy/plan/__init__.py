"""What a set-up sends, as numbers: messages and bytes, computed only here; and the start-up report.

A `StepPlan` follows from compressor, weights, parameters, sharding and ranks. It needs no process group and
takes no memory, so that it can be made for any model on any number of ranks. In training its bytes are compared with
those that are sent. Dry runs, the advisor and the fitting to memory compute with
plans. The core does without them.
"""
