"""What an acceptance run consists of: named checks, each with its figures, written down as soon as it has ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.gpu_acceptance.machine import device_here
from benchmarks.gpu_acceptance.record import Record

Figures = dict[str, Any]
DONE = ("passed", "left out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that has to hold.

    Args:
        name: A few words.
        run: Gives figures; raises where it does not hold, `LeftOut` where it cannot be tried. Takes the device.
        gpu_only: Why a CPU cannot show it; None where it can.
    """

    name: str
    run: Callable[[torch.device], Figures]
    gpu_only: str | None = None


class LeftOut(Exception):
    """A check cannot be tried on this machine, which is no fault."""


class Missed(AssertionError):
    """A bar is missed; the figures are kept all the same."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(kw_only=True, slots=True)
class Outcome:
    name: str
    status: str  # running | passed | failed | left out | not run
    why: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)


def run_checks(
    checks: Sequence[Check], only: str = "", record: Record | None = None, *, continued: bool = False
) -> list[Outcome]:
    """All of them, whatever fails; prints a line for each, and writes `record` before and after each.

    Args:
        checks: In order.
        only: A part of the names of those that are wanted.
        record: Where they are written to.
        continued: Leave out what `record` has as passed.
    """
    outcomes = []
    for check in [each for each in checks if only in each.name]:
        earlier = record.get(check.name) if record is not None and continued else None
        if earlier is not None and earlier["status"] in DONE:
            outcomes.append(Outcome(**earlier))
            continue
        outcome = Outcome(name=check.name, status="running")
        if record is not None:
            record.put(asdict(outcome))
        start = time.perf_counter()
        _try(check, outcome)
        outcome.seconds = round(time.perf_counter() - start, 1)
        outcomes.append(outcome)
        if record is not None:
            record.put(asdict(outcome))
        print(f"{outcome.status:8} {outcome.seconds:7.1f} s  {outcome.name}  {outcome.why[:100]}", flush=True)
    return outcomes


def _try(check: Check, outcome: Outcome) -> None:
    device = device_here()
    outcome.status = "left out"
    if check.gpu_only is not None and device.type != "cuda":
        outcome.why = check.gpu_only
    else:
        try:
            outcome.figures = check.run(device)
            outcome.status = "passed"
        except LeftOut as why:
            outcome.why = str(why)
        except Exception as error:  # one failure must not hide the others
            outcome.figures = getattr(error, "figures", {})
            outcome.status, outcome.why = "failed", f"{type(error).__name__}: {error}"[-2000:]
            traceback.print_exc()
