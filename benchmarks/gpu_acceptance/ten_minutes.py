"""What a short loan of a GPU is spent on: what has not been shown yet, in the order of what it tells."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SHOWN = Path(__file__).resolve().parents[1] / "results" / "gpu_shown.json"


class Wanted(NamedTuple):
    """A check, the part that it is of, and how long it takes at most on one GPU."""

    part: str
    name: str
    seconds: float


ORDER = (
    Wanted("kernels", "rotation and the largest of chunks are the reference's", 30),
    Wanted("kernels", "every kernel is compiled and runs", 30),
    Wanted("kernels", "bytes of the kernels are the reference's", 120),
    Wanted("memory", "memory of large models", 60),
    Wanted("speed", "speed as a share of a copy", 90),
    Wanted("ranks_more", "loco_hsdp", 120),
    Wanted("ranks_more", "loco_fsdp, two levels", 90),
    Wanted("ranks_more", "loco_ddp, two levels", 90),
    Wanted("ranks_more", "outer steps", 90),
    Wanted("ranks_more", "loco_fsdp, micro-batches kept", 90),
    Wanted("ranks_more", "loco_fsdp, differences of weights", 90),
    Wanted("methods", "methods and a controller train beside uncompressed DDP", 150),
    Wanted("ranks_more", "loco_fsdp, activation checkpointing", 90),
    Wanted("ranks", "loco_fsdp, bf16-true", 90),
    Wanted("ranks", "loco_ddp, bf16-true", 90),
)


def shown_so_far() -> dict[str, str]:
    """Checks that have passed on a GPU: on which, and when."""
    found: dict[str, str] = json.loads(SHOWN.read_text())
    return found


def spend(
    seconds: float, run: Callable[[Wanted, float], None], shown: Iterable[str], clock: Callable[[], float]
) -> list[Wanted]:
    """Run what has not been shown and fits into what is left of the time, in order. Returns what was run."""
    end, done, known = clock() + seconds, [], set(shown)
    for wanted in ORDER:
        if wanted.name not in known and wanted.seconds <= (left := end - clock()):
            run(wanted, left)
            done.append(wanted)
    return done


def newly_shown(results: Mapping[str, Any]) -> dict[str, str]:
    """What a run adds to the file: nothing without a GPU."""
    machine = results["machine"]
    if machine["kind"] != "cuda":
        return {}
    checks = (check for part in results["parts"].values() for check in part["checks"])
    when = time.strftime("%Y-%m-%d")
    return {check["name"]: f"{machine['device']}, {when}" for check in checks if check["status"] == "passed"}


def pack(folder: Path, results: Mapping[str, Any]) -> Path:
    """One archive of everything to bring back, with what has been shown by now, to commit as `SHOWN`."""
    shown = dict(sorted((shown_so_far() | newly_shown(results)).items()))
    (folder / SHOWN.name).write_text(json.dumps(shown, indent=1) + "\n")
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)
    return archive
