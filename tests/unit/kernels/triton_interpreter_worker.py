"""Run as a process of its own by `test_triton_interpreter`: the switch is read when triton is imported.

Prints one line a difference and ``cases: N`` last.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys

from lowbit_strategy.kernels.triton import blocks, loco
from lowbit_strategy.kernels.triton.layout import device_format
from lowbit_strategy.kernels.triton.tiles import encode_launch
from tests.kernel_cases import cases, check_case


def main(part: int, num_parts: int) -> None:
    checked = 0
    for i, case in enumerate(cases()):
        if i % num_parts == part:
            launch = encode_launch(device_format(case.fmt), case.dtype, case.residual)
            for line in check_case(case, blocks, loco, launch.tile(case.fmt.block_size), "cpu", truncating=True):
                print(line)
            checked += 1
    print(f"cases: {checked}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
