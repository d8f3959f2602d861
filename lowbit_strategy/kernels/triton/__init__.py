"""The Triton path for GPUs: one launch for a whole table of segments, one pass over memory.

Imported only when a tensor on a GPU asks for it, so that a machine without Triton can import everything else.
"""
