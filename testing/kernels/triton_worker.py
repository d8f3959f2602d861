"""Run as a process of its own by `tests/unit/kernels/triton`: the switch is read when triton is imported.

Prints one line per difference and ``cases: N`` last.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys

import torch

from lowbit_strategy.kernels.reference import rotation as reference
from lowbit_strategy.kernels.rotation import signs
from lowbit_strategy.kernels.triton import blocks, dense, rotation
from lowbit_strategy.kernels.triton.layout import device_format
from lowbit_strategy.kernels.triton.tiles import encode_launch
from testing.kernels.cases import check_case, check_dense, check_sources, core_cases, other_cases, quick_cases


def main(which: str, part: int, num_parts: int) -> None:
    if which in ("pairs", "triples"):
        fewer = which == "pairs"
        wrong = check_sources(blocks, "cpu", fewer=fewer) + check_dense(dense, "cpu", truncating=True, fewer=fewer)
        print(*wrong, "cases: 2", sep="\n")
        return
    if which == "rotations":
        print(*differing_rotations(), "cases: 12", sep="\n")
        return
    chosen = {"quick": quick_cases, "core": core_cases, "other": other_cases}[which]()[part::num_parts]
    for case in chosen:
        tile = encode_launch(device_format(case.fmt), case.residual).tile(case.fmt.block_size)
        for line in check_case(case, blocks, tile, "cpu", truncating=True):
            print(line)
    print(f"cases: {len(chosen)}")


def differing_rotations() -> list[str]:
    """Of rows that fill programs and of a rest, of ordinary, tiny and huge numbers."""
    wrong = []
    for num_rows, size in ((1, 2), (5, 32), (300, 32), (33, 128), (3, 512), (1, 512)):
        x_KN = torch.randn(num_rows, size) * 10.0 ** torch.randint(-30, 30, (num_rows, 1))
        for inverse in (False, True):
            ours, wanted = (
                module.rotate(x_KN, signs(size, x_KN.device), inverse=inverse) for module in (rotation, reference)
            )
            if not torch.equal(ours, wanted):
                wrong.append(f"{num_rows} rows of {size}, inverse {inverse}: {int((ours != wanted).sum())} differ")
    return wrong


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
