"""What a set-up sends, as numbers: messages and bytes, computed only here.

A `StepPlan` follows from compressor, weights, parameters, sharding and ranks. It needs no process group and
takes no memory, so that it can be made for any model on any number of ranks. The engine's byte check, the start-up
report and dry runs read it.
"""
