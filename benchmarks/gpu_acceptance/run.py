"""Three parts of under ten minutes each, after which whoever has one GPU knows whether this package works on it.

    python benchmarks/gpu_acceptance/run.py                 # all parts; JSON and results.md in gpu_acceptance_results/
    python benchmarks/gpu_acceptance/run.py --part kernels  # or two_ranks, memory

Without a GPU it runs what a CPU can show and says what it left out.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

from gpu_acceptance.checks import run_checks, write  # noqa: E402

PARTS = ("kernels", "two_ranks", "memory")
LIMIT_S = 600


def run_part(part: str, folder: Path, only: str) -> int:
    checks = importlib.import_module(f"gpu_acceptance.{part}").CHECKS
    outcomes = run_checks(checks, only)
    write(outcomes, f"{PARTS.index(part) + 1}_{part}", folder)
    return sum(outcome.status == "failed" for outcome in outcomes)


def run_all(folder: Path, only: str) -> int:
    """Each part in a process of its own, so that none takes the others along."""
    failed = 0
    for part in PARTS:
        print(f"-- {part}", flush=True)
        command = [sys.executable, __file__, "--part", part, "--only", only, "--folder", str(folder)]
        try:
            failed += subprocess.run(command, timeout=LIMIT_S).returncode != 0
        except subprocess.TimeoutExpired:
            print(f"{part} took more than {LIMIT_S} s", file=sys.stderr)
            failed += 1
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="one part; without it all, one after the other")
    parser.add_argument("--only", default="", help="checks whose name holds this text")
    parser.add_argument("--folder", type=Path, default=Path("gpu_acceptance_results"), help="for JSON and the page")
    arguments = parser.parse_args()
    if arguments.part:
        sys.exit(run_part(arguments.part, arguments.folder, arguments.only) > 0)
    sys.exit(run_all(arguments.folder, arguments.only) > 0)


if __name__ == "__main__":
    main()
