"""What a turn takes among replicas that may come and go, beside the same turn of ranks that stay.

    python -m benchmarks.elastic_exchange --json benchmarks/results/elastic_exchange.json

Four processes each, the same model and compressor over gloo on this machine, turns alternately of both kinds of run:
first a run of one kind, then of the other, several times. A turn is everything between the last local step of a round
and the moved anchors: for replicas that includes asking the lighthouse, agreeing and confirming.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from lowbit_strategy import DiLoCo, Elastic
from testing.processes.ranks import run_ranks
from testing.processes.replicas import Replicas
from testing.training.elastic import Replica, outer_without

NAMES = "abcd"
RULE = DiLoCo(every=1)


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def timed(elastic: Elastic, width: int, turns: int) -> list[float]:
    """Seconds of each turn of one replica."""
    replica = Replica(elastic, rule=RULE, model=net(width))
    replica.outer.join()
    replica.outer.on_sync = lambda: None  # the model's notes, which digest all anchors once more
    found = [seconds(replica.model, functools.partial(replica.outer.after_step, 0.1)) for _ in range(turns)]
    replica.outer.finish()
    replica.membership.leave()
    return found


def timed_without(rank: int, world_size: int, width: int, turns: int) -> list[float]:
    """The same of a rank that stays."""
    model = net(width)
    outer = outer_without(model, RULE)
    return [seconds(model, functools.partial(outer.after_step, 0.1)) for _ in range(turns)]


def seconds(model: nn.Module, turn: functools.partial[object]) -> float:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=1e-3)
    begun = time.perf_counter()
    turn()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536, help="of four square layers")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"replicas": [], "ranks": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder, Replicas(Path(folder), timeout=600, min_replicas=4) as run:
            for name in NAMES:
                run.start(name, timed, options.width, options.turns)
            found["replicas"].append(of_the_slowest(list(run.results(*NAMES).values())))
        found["ranks"].append(of_the_slowest(run_ranks(timed_without, 4, options.width, options.turns, timeout=600)))
    ratios = [one / other for one, other in zip(found["replicas"], found["ranks"], strict=True)]
    report = {
        "parameters": sum(param.numel() for param in net(options.width).parameters()),
        "turn_s": {kind: [round(each, 4) for each in times] for kind, times in found.items()},
        "ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def of_the_slowest(ranks: list[list[float]]) -> float:
    """The median turn's time on the rank that took longest in each; the first two make connections and tables."""
    return statistics.median(max(times) for times in list(zip(*ranks, strict=True))[2:])


if __name__ == "__main__":
    main()
