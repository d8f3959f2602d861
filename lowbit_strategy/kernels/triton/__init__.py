"""The Triton path for GPUs: one launch for a whole table of segments, one pass over memory.

Imported only when a tensor on a GPU asks for it, so that a machine without Triton can import everything else.
"""

import triton

OLDEST = (3, 6)  # 3.5 fails to compile some of the kernels

if tuple(int(number) for number in triton.__version__.split(".")[:2]) < OLDEST:
    raise RuntimeError(
        f"Triton {triton.__version__} is too old for the GPU kernels, which need {OLDEST[0]}.{OLDEST[1]} or newer:"
        " a newer torch includes it"
    )
