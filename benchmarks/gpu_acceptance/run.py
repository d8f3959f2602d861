"""Parts of under eight minutes each, after which whoever has GPUs knows whether this package works on them.

    python benchmarks/gpu_acceptance/run.py                 # all parts; results.html and results.json in --folder
    python benchmarks/gpu_acceptance/run.py --part kernels  # one; the names are below
    python benchmarks/gpu_acceptance/run.py --continue      # what has not passed yet
    python benchmarks/gpu_acceptance/run.py --minutes 10    # what no GPU has shown yet, what tells most first

Any Python that has torch, Triton and what `pyproject.toml` names will do: nothing is installed. All that a run has
written is in one archive beside the folder.

Every check is written down when it has ended. A part that takes longer than its limit is ended with all that it has
started; what was under way has failed, and `--continue` goes on behind it. Without a GPU the same command shows what a
CPU can show and tells what it left out; a machine with a driver that torch does not use is an error.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_acceptance import machine
from benchmarks.gpu_acceptance.checks import DONE, run_checks
from benchmarks.gpu_acceptance.processes import supervise
from benchmarks.gpu_acceptance.record import Record, write_page
from benchmarks.gpu_acceptance.ten_minutes import Wanted, pack, shown_so_far, spend

PARTS = ("kernels", "speed", "two_ranks", "interruptions", "memory", "methods", "ranks", "ranks_more")
LIMIT_S = 480.0


def name_of(part: str) -> str:
    return f"{PARTS.index(part) + 1 if part in PARTS else 9}_{part}"


def run_here(part: str, folder: Path, only: str, *, continued: bool) -> int:
    """One part in this process. Returns how many checks have not passed."""
    checks = importlib.import_module(f"benchmarks.gpu_acceptance.{part}" if part in PARTS else part).CHECKS
    outcomes = run_checks(checks, only, Record(folder, name_of(part), fresh=not continued), continued=continued)
    return sum(outcome.status not in DONE for outcome in outcomes)


def run_apart(part: str, folder: Path, only: str, *, continued: bool, limit_s: float) -> int:
    """One part in a session of its own, so that none takes the others along. Returns how many checks have failed."""
    print(f"-- {part}", flush=True)
    command = [sys.executable, __file__, "--here", part, "--only", only, "--folder", str(folder)]
    ended = supervise([*command, *(["--continue"] if continued else [])], limit_s)
    record = Record(folder, name_of(part), fresh=False)
    limit = f"the part took more than {limit_s:.0f} s" if ended.returncode is None else f"status {ended.returncode}"
    for name in record.fail_unfinished(f"its process ended before it ({limit}); go on behind it with --continue"):
        print(f"failed   {name}: {limit}", file=sys.stderr)
    if ended.left and ended.returncode is not None:
        why = f"processes were left and have been ended: {'; '.join(ended.left)}"
        record.put({"name": "nothing is left running", "status": "failed", "why": why, "seconds": 0.0, "figures": {}})
        print(f"failed   {why}", file=sys.stderr)
    failed = sum(check["status"] not in DONE for check in record.checks.values())
    return max(failed, ended.returncode != 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", help=f"one of {', '.join(PARTS)}; repeat; without it all of them")
    parser.add_argument("--only", default="", help="checks whose name holds this text")
    parser.add_argument("--continue", dest="continued", action="store_true", help="leave out what has passed")
    parser.add_argument("--folder", type=Path, default=Path("gpu_acceptance_results"), help="for JSON and the page")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds per part")
    parser.add_argument("--minutes", type=float, help="what fits into so many, of what no GPU has shown yet")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (why := machine.unused_driver()) is not None:
        sys.exit(f"failed: {why}")
    folder, only, continued = arguments.folder.resolve(), arguments.only, arguments.continued
    if arguments.here:
        sys.exit(run_here(arguments.here, folder, only, continued=continued) > 0)
    failed = 0

    def run(wanted: Wanted, limit_s: float) -> None:
        nonlocal failed
        failed += run_apart(wanted.part, folder, wanted.name, continued=True, limit_s=min(limit_s, arguments.limit))
        write_page(folder)

    if arguments.minutes is not None:
        spend(60 * arguments.minutes, run, shown_so_far(), time.monotonic)
    else:
        for part in arguments.part or PARTS:
            failed += run_apart(part, folder, only, continued=continued, limit_s=arguments.limit)
            write_page(folder)
    found = write_page(folder)
    print(f"{pack(folder, found)} has all of it, {folder / 'results.html'} the page\n{found['line']}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
