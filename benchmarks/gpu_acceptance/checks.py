"""What an acceptance run consists of: named checks, each with its figures, and the page about them."""

from __future__ import annotations

import json
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that has to hold.

    Args:
        name: A few words.
        run: Gives figures; raises where it does not hold. Takes the device.
        gpu_only: Why a CPU cannot show it; None where it can.
    """

    name: str
    run: Callable[[torch.device], Figures]
    gpu_only: str | None = None


@dataclass(kw_only=True, slots=True)
class Outcome:
    name: str
    status: str  # passed | failed | left out
    why: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)


def device_here() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def run_checks(checks: Sequence[Check], only: str = "") -> list[Outcome]:
    """All of them, whatever fails; prints a line for each."""
    device, outcomes = device_here(), []
    for check in checks:
        if only not in check.name:
            continue
        outcome = Outcome(name=check.name, status="passed")
        start = time.perf_counter()
        if check.gpu_only is not None and device.type != "cuda":
            outcome.status, outcome.why = "left out", check.gpu_only
        else:
            try:
                outcome.figures = check.run(device)
            except Exception as error:  # one failure must not hide the others
                outcome.status, outcome.why = "failed", f"{type(error).__name__}: {error}"[-2000:]
                traceback.print_exc()
        outcome.seconds = round(time.perf_counter() - start, 1)
        outcomes.append(outcome)
        print(f"{outcome.status:8} {outcome.seconds:7.1f} s  {outcome.name}  {outcome.why[:100]}", flush=True)
    return outcomes


def machine() -> Figures:
    device = device_here()
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "kind": device.type, "torch": torch.__version__, "python": platform.python_version()}


def write(outcomes: Sequence[Outcome], part: str, folder: Path) -> None:
    """``part.json``, and the page ``results.md`` of all parts that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "checks": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{part}.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    (folder / "results.md").write_text(page(folder))


def page(folder: Path) -> str:
    lines = ["# GPU acceptance", ""]
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        where = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
        lines += [f"## {path.stem}", "", where, "", "| check | outcome | seconds | figures |", "|---|---|---|---|"]
        for check in record["checks"]:
            figures = ", ".join(f"{key} {_short(value)}" for key, value in check["figures"].items())
            outcome = (figures or check["why"]).replace("|", "/").replace("\n", " ")[-600:]
            lines.append(f"| {check['name']} | {check['status']} | {check['seconds']} | {outcome} |")
        lines.append("")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
