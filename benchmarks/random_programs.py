"""Random training loops over every layout, and checkpoints that go on in another one: no figure, but what is wrong.

    python -m benchmarks.random_programs --seeds 500 --first 1000

Each program is run with compression and without, told in several ways, with validations in between, and resumed; what
must hold is in `testing/training/random_loop/`. Programs of one layout share a launch, ten at a time. A program that
ends its launch, by an error or a rank that dies or hangs, is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from testing.training.random_loop import LAYOUTS, Program, launched

_AT_A_TIME = 10


def check(programs: Sequence[Program], onto: str | None) -> int:
    """How many are wrong; says which."""
    wrong, left = 0, list(programs)
    while left:
        several, left = left[:_AT_A_TIME], left[_AT_A_TIME:]
        with tempfile.TemporaryDirectory(prefix="programs-") as folder:
            try:
                found = launched(Path(folder), several, onto)
            except AssertionError as error:
                if len(several) > 1:  # which of them is not known
                    wrong += sum(check([each], onto) for each in several)
                    continue
                found = [(several[0], [str(error)])]
        wrong += len(found)
        for program, texts in found:
            print(f"{program}{f', then {onto}' if onto else ''}\n    " + "\n    ".join(texts), flush=True)
        if found and "Traceback" in found[-1][1][0]:
            left = several[several.index(found[-1][0]) + 1 :] + left if onto is None else left
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=70, help="number of programs, over all layouts")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="LAYOUT")
    arguments = parser.parse_args()
    wrong, began = 0, time.monotonic()
    seeds = range(arguments.first, arguments.first + -(-arguments.seeds // len(arguments.layouts)))
    for at, layout in itertools.product(range(0, len(seeds), _AT_A_TIME), arguments.layouts):
        some = seeds[at : at + _AT_A_TIME]
        wrong += check([Program.draw(layout, seed) for seed in some], None)
        others = [name for name in LAYOUTS if name != layout and LAYOUTS[name].is_local == LAYOUTS[layout].is_local]
        other = others[some[0] // _AT_A_TIME % len(others)]
        wrong += check([Program.draw(layout, seed) for seed in some[:3]], other)
        print(
            f"{layout}: seeds {some[0]} to {some[-1]}, {wrong} wrong so far, {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
