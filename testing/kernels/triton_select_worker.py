"""Run as a process of its own by `tests/unit/kernels/triton`: the switch is read when triton is imported.

Prints one line for each difference and ``cases: N`` last.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from lowbit_strategy.kernels.reference import select as reference
from lowbit_strategy.kernels.triton import select
from testing.kernels.chunk_cases import chunk_cases


def main() -> None:
    cases = chunk_cases()
    for name, x, kept_M, room in cases:
        results = []
        for module in (reference, select):
            positions = torch.zeros(kept_M.numel(), room, dtype=torch.int16)
            values = torch.zeros(kept_M.numel(), room, dtype=torch.float32)
            module.chunk_top_k(x, kept_M, positions, values)
            results.append((positions, values.view(torch.int32)))
        for what, wanted, found in zip(("positions", "values"), *results, strict=True):
            if not torch.equal(wanted, found):
                print(f"{name}: {what} differ in {int((wanted != found).sum())} places")
    print(f"cases: {len(cases)}")


if __name__ == "__main__":
    main()
