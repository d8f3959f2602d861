"""What replicas that come and go cost in loss.

A replica that joins in the middle: with an inner optimizer of its own, or with a copy of the helping one's.

    python -m benchmarks.elastic_loss --json benchmarks/results/elastic_loss.json

Three replicas of a small model train with AdamW and local steps, in one process; half-way a fourth one gets the anchor
and begins to count. Learning rates fall to zero. Same weights, same batches, three seeds. Reported is the validation
loss of the anchor over that of the run in which nobody joins, after the newcomer's first rounds and at the end, in per
cent.

Faults: of four replicas one is lost in every second round, with what it has trained in it, and another one comes, and
counts from its first whole round. Reported is the validation loss over that of four that stay and train with as many
samples.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.low_bits import LEARNING_RATES
from benchmarks.small_models import make_model, text_of
from lowbit_strategy import DiLoCo

CONTEXT, BATCH, EVERY, ROUNDS, REPLICAS = 16, 16, 20, 40, 3
FIRST = 3  # rounds after which the newcomer's effect is reported for the first time
Joins = Literal["nobody", "own", "inherited"]


class Worker:
    """One replica's model and inner optimizer."""

    def __init__(self, kind: str, rank: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = make_model(kind, CONTEXT)
        rate = LEARNING_RATES[kind]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.order = torch.Generator().manual_seed(1000 * seed + rank)
        self.text = text_of(kind, "train")

    def train(self, share_left: float) -> None:
        """One round; the learning rate falls as a cosine to zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATES[self.kind] * 0.5 * (1 - math.cos(math.pi * share_left))
        for _ in range(EVERY):
            starts = torch.randint(self.text.numel() - CONTEXT - 1, (BATCH,), generator=self.order)
            self.optimizer.zero_grad()
            loss_of(self.model, self.text, starts).backward()
            self.optimizer.step()


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, kind: str) -> float:
    text = text_of(kind, "validation")
    starts = torch.arange(2048) * ((text.numel() - CONTEXT - 1) // 2048)
    return statistics.fmean(loss_of(model, text, part).item() for part in starts.split(256))


def run(kind: str, joins: Joins, seed: int) -> tuple[float, float]:
    """Validation losses `FIRST` rounds after the middle and at the end."""
    workers = [Worker(kind, rank, seed) for rank in range(REPLICAS)]
    anchor = copy.deepcopy(workers[0].model)
    outer = DiLoCo(every=EVERY).optimizer(list(anchor.parameters()))
    losses = []
    for round_index in range(ROUNDS):
        if round_index == ROUNDS // 2 and joins != "nobody":
            workers.append(Worker(kind, REPLICAS, seed))
            if joins == "inherited":
                workers[-1].optimizer.load_state_dict(copy.deepcopy(workers[0].optimizer.state_dict()))
        turn(anchor, outer, workers, 1 - round_index / ROUNDS)
        if round_index + 1 in (ROUNDS // 2 + FIRST, ROUNDS):
            losses.append(validation_loss(anchor, kind))
    return losses[0], losses[1]


def with_faults(kind: str, seed: int, *, inherits: bool) -> tuple[float, int]:
    """The validation loss, and how many rounds of one replica have counted."""
    workers = [Worker(kind, rank, seed) for rank in range(4)]
    anchor = copy.deepcopy(workers[0].model)
    outer = DiLoCo(every=EVERY).optimizer(list(anchor.parameters()))
    counted = 0
    for round_index in range(2 * ROUNDS + 1):  # the last one has all four, as it has without faults
        lost = workers[round_index // 2 % 4] if round_index % 2 else None
        present = [worker for worker in workers if worker is not lost]
        turn(anchor, outer, present, 1 - round_index / (2 * ROUNDS + 1))
        counted += len(present)
        if lost is not None:
            comes = workers[workers.index(lost)] = Worker(kind, 4 + round_index, seed)
            if inherits:
                comes.optimizer.load_state_dict(copy.deepcopy(present[0].optimizer.state_dict()))
    return validation_loss(anchor, kind), counted


def undisturbed(kind: str, seed: int, counted: int) -> float:
    workers = [Worker(kind, rank, seed) for rank in range(4)]
    anchor = copy.deepcopy(workers[0].model)
    outer = DiLoCo(every=EVERY).optimizer(list(anchor.parameters()))
    for round_index in range(counted // 4):
        turn(anchor, outer, workers, 1 - round_index / (counted // 4))
    return validation_loss(anchor, kind)


def turn(anchor: nn.Module, outer: torch.optim.Optimizer, workers: list[Worker], share_left: float) -> None:
    """A round of local steps of each, and the outer step with their mean."""
    for worker in workers:
        worker.model.load_state_dict(anchor.state_dict())
        worker.train(share_left)
    for shared, *own in zip(anchor.parameters(), *(worker.model.parameters() for worker in workers), strict=True):
        shared.grad = shared.detach() - torch.stack([param.detach() for param in own]).mean(0)
    outer.step()


def summary(gaps: list[float]) -> str:
    return f"{statistics.fmean(gaps):+.2f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, dict[str, list[str]]] = {}
    for kind in ("transformer", "recurrent", "convolutional"):
        found: dict[str, list[tuple[float, float]]] = {"own": [], "inherited": []}
        for seed in range(options.seeds):
            alone = run(kind, "nobody", seed)
            for joins in ("own", "inherited"):
                ours = run(kind, joins, seed)  # type: ignore[arg-type]
                found[joins].append((100 * (ours[0] / alone[0] - 1), 100 * (ours[1] / alone[1] - 1)))
        report[kind] = {joins: [summary(list(c)) for c in zip(*gaps, strict=True)] for joins, gaps in found.items()}
        for inherits in (False, True):
            disturbed = []
            for seed in range(options.seeds):
                loss, counted = with_faults(kind, seed, inherits=inherits)
                disturbed.append(100 * (loss / undisturbed(kind, seed, counted) - 1))
            report[kind]["faults, inherited" if inherits else "faults, own"] = [summary(disturbed)]
        print(kind, report[kind], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
