"""Run as a process of its own by `tests/unit/kernels/triton`: the switch is read when triton is imported.

Prints one line per difference and ``cases: N`` last.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from lowbit_strategy.kernels.triton import blocks, dense
from lowbit_strategy.kernels.triton.layout import device_format, encode_launch
from lowbit_strategy.methods.zoo.kernels.triton import chunk_top_k, rotation
from testing.kernels.cases import (
    check_case,
    check_dense,
    check_sources,
    check_unaligned,
    core_cases,
    other_cases,
    quick_cases,
)
from testing.kernels.row_cases import check_chunks, check_rotations


def fused(builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """What a GPU does, where the interpreter rounds the product: so these tests see what is fused, too."""
    total = x.data.astype(np.longdouble) * y.data.astype(np.longdouble) + z.data.astype(np.longdouble)
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


InterpreterBuilder.create_fma = fused


def main(which: str, part: int, num_parts: int) -> None:
    if which in ("pairs", "triples"):
        fewer = which == "pairs"
        wrong = check_sources(blocks, "cpu", fewer=fewer) + check_dense(dense, "cpu", truncating=True, fewer=fewer)
        wrong += check_unaligned(blocks, "cpu")
        print(*wrong, "cases: 2", sep="\n")
        return
    if which == "rows":
        wrong = check_rotations(rotation, "cpu") + check_chunks(chunk_top_k, "cpu")
        print(*wrong, "cases: 2", sep="\n")
        return
    chosen = {"quick": quick_cases, "core": core_cases, "other": other_cases}[which]()[part::num_parts]
    for case in chosen:
        tile = encode_launch(device_format(case.fmt), case.residual).tile(case.fmt.block_size)
        for line in check_case(case, blocks, tile, "cpu", truncating=True):
            print(line)
    print(f"cases: {len(chosen)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
