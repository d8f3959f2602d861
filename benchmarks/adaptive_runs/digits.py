"""Digits: scikit-learn's 1797 images of 8 x 8, a small network, four ranks, Accordion against its two levels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.adaptive_runs.ranks import Ranks
from lowbit_strategy.control import Accordion
from lowbit_strategy.control.base import Controller
from lowbit_strategy.hooks.loop import LoopClock
from lowbit_strategy.reducers.base import Compressor
from lowbit_strategy.reducers.dense import Dense
from lowbit_strategy.reducers.powersgd import PowerSGD
from lowbit_strategy.reducers.topk import TopK

WORLD_SIZE = 4
BATCH = 32  # a rank
EPOCHS = 60
INTERVAL = 3
LEARNING_RATE, MOMENTUM = 0.1, 0.9
DECAYS = (30, 45)
TEST_SHARE = 3  # one image in so many is for testing

PAIRS: dict[str, tuple[Compressor, Compressor]] = {
    "powersgd 4 / 1": (PowerSGD(rank=4, start_step=0), PowerSGD(rank=1, start_step=0)),
    "topk 10 % / 0.5 %": (TopK(density=0.1), TopK(density=0.005)),
}


def methods() -> dict[str, Compressor | Controller]:
    """Everything that is compared, by name."""
    chosen: dict[str, Compressor | Controller] = {"uncompressed": Dense()}
    for name, (light, heavy) in PAIRS.items():
        chosen[f"{name}: light"] = light
        chosen[f"{name}: heavy"] = heavy
        chosen[f"{name}: Accordion"] = Accordion(light=light, heavy=heavy, interval=INTERVAL)
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class DigitsRun:
    """One run: final test accuracy, bytes, and how it went."""

    method: str
    seed: int
    accuracy: float
    test_loss: float
    sent_nbytes: float
    num_switches: int
    light_share: float


def images(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, split at random; pixels in [0, 1], centred."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.from_numpy(data.data).float() / 16 - 0.3
    y = torch.from_numpy(data.target).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(500 + seed))
    test = order[: len(y) // TEST_SHARE]
    train = order[len(y) // TEST_SHARE :]
    return x[train], y[train], x[test], y[test]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(name: str, method: Compressor | Controller, seed: int) -> DigitsRun:
    """The whole run; deterministic."""
    x, y, x_test, y_test = images(seed)
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, DECAYS, 0.1)
    steps_per_epoch = len(y) // (BATCH * WORLD_SIZE)
    ranks = Ranks(model, method, LoopClock(optimizer, EPOCHS * steps_per_epoch, steps_per_epoch), WORLD_SIZE, seed)
    order = torch.Generator().manual_seed(900 + seed)
    light = 0.0
    for _ in range(EPOCHS):
        shuffled = torch.randperm(len(y), generator=order)
        for step in range(steps_per_epoch):
            gradients = []
            for rank in range(WORLD_SIZE):
                first = (step * WORLD_SIZE + rank) * BATCH
                chosen = shuffled[first : first + BATCH]
                loss = F.cross_entropy(model(x[chosen]), y[chosen])
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            ranks.mean_(model, gradients)
            optimizer.step()
            light += ranks.light_share()
        scheduler.step()
    with torch.no_grad():
        logits = model(x_test)
    ranks.close()
    return DigitsRun(
        method=name,
        seed=seed,
        accuracy=(logits.argmax(1) == y_test).float().mean().item(),
        test_loss=F.cross_entropy(logits, y_test).item(),
        sent_nbytes=ranks.sent_nbytes,
        num_switches=ranks.num_switches,
        light_share=light / (EPOCHS * steps_per_epoch),
    )
