"""Replicas are killed at every moment of a turn, again and again, beside three that stay.

    python -m benchmarks.elastic_faults --times 20 --json benchmarks/results/elastic_faults.json

One run of small replicas trains throughout. For each fault one more replica joins and kills itself at the moment in
question. Reported are, for each moment, the seconds from its death to the next turn that the others commit, and
whether all who have taken the same turns have the same anchors. A round of the replicas takes `ROUND_S`, a replica is
lost when it has had no heartbeat for `HEARTBEAT_S`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from testing.processes.replicas import HEARTBEAT_S, Replicas
from testing.training.elastic import EVERY, TrainedReplica, Turn, train

PAUSE_S = 0.03
ROUND_S = EVERY * PAUSE_S
STAY = ("k", "l", "m")
MOMENTS = ("before", "exchange", "received", "confirming", "committed", "connecting", "helping", "healing")

NEED_ANOTHER = ("connecting", "helping")  # who comes; the lowest one by name is the one that helps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="faults at each moment, for each place")
    parser.add_argument("--moment", action="append", choices=MOMENTS, help="these only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    moments = options.moment or MOMENTS
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, Replicas(Path(name), timeout=7200) as run:
        for each in STAY:
            run.start(each, train, Path(name), 1, PAUSE_S, until="stop", start_with=len(STAY))
        run.wait_for(lambda: all(turns(Path(name), each) for each in STAY), "the replicas have started", 300)
        start = time.monotonic()
        cases = [
            (f"{place}-{number}-{moment}", moment)
            for number in range(options.times)
            for moment in moments
            for place in (("a",) if moment in NEED_ANOTHER else ("a", "z"))
        ]
        for ahead, case in enumerate(cases):
            for each in cases[:2] if ahead == 0 else cases[ahead + 1 : ahead + 2]:
                prepare(run, Path(name), *each)  # a process takes seconds to start
            seconds = fault(run, Path(name), *case)
            found.setdefault(f"{case[1]}, {'lowest' if case[0][0] == 'a' else 'highest'}", []).append(seconds)
            print(f"{case[0]}: {seconds:.2f} s", flush=True)
        wall = time.monotonic() - start
        (Path(name) / "stop").touch()
        results = run.results(*STAY)
        num_syncs = check(Path(name), results)
    report = {
        "heartbeat_s": HEARTBEAT_S,
        "round_s": ROUND_S,
        "faults": sum(map(len, found.values())),
        "wall_s": round(wall, 1),
        "turns": num_syncs,
        "recovery_s": {
            moment: {"median": round(statistics.median(times), 2), "worst": round(max(times), 2), "times": len(times)}
            for moment, times in found.items()
        },
    }
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def prepare(run: Replicas, folder: Path, victim: str, moment: str) -> None:
    """Start the processes that the fault needs; they wait."""
    turn = 0 if moment == "healing" else 2
    run.start(victim, train, folder, 1, PAUSE_S, (moment, turn), until="stop", held=True)
    if moment in NEED_ANOTHER:
        run.start(f"y{victim}", train, folder, 1, PAUSE_S, ("before", 3), until="stop", held=True)


def fault(run: Replicas, folder: Path, victim: str, moment: str) -> float:
    """One more replica joins and dies at `moment`. Returns the seconds until the others have committed a turn."""
    run.release(victim)
    extra = f"y{victim}" if moment in NEED_ANOTHER else None
    if extra is not None:
        run.wait_for(lambda: turns(folder, victim) >= 2, f"{victim} takes part", 120)
        run.release(extra)
    struck = folder / f"{victim}.struck"
    run.wait_for(struck.exists, f"{victim} dies ({moment})", 120)
    died = float(wait_for_text(struck))
    run.wait_for(lambda: bool(committed_without(folder, victim, died)), "the others go on", 120)
    first = committed_without(folder, victim, died)
    if extra is not None:
        run.wait_for((folder / f"{extra}.struck").exists, f"{extra} dies", 120)
    for name in (victim, extra):
        if name is not None:
            run.processes.pop(name).join()
    return max(first) - died


def wait_for_text(path: Path) -> str:
    while not (text := path.read_text()):
        time.sleep(0.01)
    return text


def turns(folder: Path, name: str) -> int:
    path = folder / f"{name}.turns"
    return path.read_text().count("\n") if path.exists() else 0


def committed_without(folder: Path, lost: str, died: float) -> list[float]:
    """When those that stay have committed the first turn without the one that `died`; empty until all have."""
    times = []
    for name in STAY:
        lines = (folder / f"{name}.turns").read_text().splitlines(keepends=True)[-200:]
        taken = [Turn(**json.loads(line)) for line in lines if line.endswith("\n")]
        without = [turn.time for turn in taken if turn.time > died and lost not in turn.members]
        if not without:
            return []
        times.append(min(without))
    return times


def check(folder: Path, results: dict[str, TrainedReplica]) -> int:
    """Whoever has taken the same turns has the same anchors; all who stay end with the same. Returns turns in all."""
    digests: dict[int, int] = {}
    for path in folder.glob("*.turns"):
        for turn in (Turn(**json.loads(line)) for line in path.read_text().splitlines()):
            assert digests.setdefault(turn.history, turn.digest) == turn.digest, path
    assert len({result.digest for result in results.values()}) == 1
    assert all(result.healed <= 1 for result in results.values())
    return len(digests)


if __name__ == "__main__":
    main()
