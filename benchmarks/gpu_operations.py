"""Torch's operations of an FSDP2 module in a step with each preset, beside FSDP2's own. No GPU is needed.

python -m benchmarks.gpu_operations --json benchmarks/results/gpu_operations.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from lowbit_strategy import PRESETS
from testing.counting.operations import ALONE, STOCK, of_a_module
from testing.processes.ranks import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_ranks(of_a_module, 2, [ALONE, STOCK, *PRESETS], timeout=1800)[0]
    for name, operations in found.items():
        print(f"{name:20} {operations:8.1f}  {operations / found[STOCK]:.2f} of stock")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "operations": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
