"""What imports take of a processor: torch with and without autoloading of this package, and the package after torch.

    python benchmarks/import_time.py --out import_time.json

1. start an interpreter for each measurement, the cases in turn, so that a busy machine slows all of them alike
2. report medians in ms; an installed package has its bytecode written, so the interpreters may write it

What autoloading adds to ``import torch`` is measured inside of it as well: the difference of two imports of more than a
second is not exact to a millisecond.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_TORCH = "start = time.process_time()\nimport torch"
_ADDED = """\
from importlib.metadata import entry_points
(entry,) = entry_points(group="torch.backends", name="lowbit_strategy")
start = time.process_time()
entry.load()()
"""
CASES = {  # name: (LOWBIT_AUTOLOAD or TORCH_DEVICE_BACKEND_AUTOLOAD, code)
    "torch, nothing autoloaded": ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, _TORCH),
    "torch, autoloaded": ({}, _TORCH),
    "autoload alone": ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, f"import torch\n{_ADDED}"),
    "lowbit_strategy after torch": (
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        "import torch\nstart = time.process_time()\nimport lowbit_strategy",
    ),
    "a name of lowbit_strategy": (
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        "import torch\nstart = time.process_time()\nfrom lowbit_strategy import LoCo",
    ),
}


def measure(variables: dict[str, str], code: str) -> float:
    """Milliseconds from the code's `start` to its end, in an interpreter of its own."""
    code = f"import os, time\nos.environ.update({variables!r})\n{code}\nprint(1e3 * (time.process_time() - start))"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=kept)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(arguments.repeats):
        for name, (variables, code) in CASES.items():
            times[name].append(measure(variables, code))
    result = {
        name: {"median_ms": statistics.median(each), "least_ms": min(each), "ms": each} for name, each in times.items()
    }
    for name, each in result.items():
        print(f"{name:30} {each['median_ms']:8.2f} ms, at least {each['least_ms']:.2f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
