"""Digits: scikit-learn's 1797 images of 8 x 8, a small network, four ranks, Accordion against its two levels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.adaptive_runs.ranks import ThreadedRanks
from lowbit_strategy.control import Accordion
from lowbit_strategy.control.base import Controller
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.telemetry.custom_loop import LoopClock

WORLD_SIZE = 4
MOMENTUM = 0.9
TEST_SHARE = 3  # one image in so many is for testing

PAIRS: dict[str, tuple[Compressor, Compressor]] = {
    "powersgd 4 / 1": (PowerSGD(rank=4, start_step=0), PowerSGD(rank=1, start_step=0)),
    "topk 10 % / 0.5 %": (TopK(density=0.1), TopK(density=0.005)),
}
UNCOMPRESSED = "uncompressed"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A task.

    Args:
        network: Makes the model.
        train_images: How many of the training images are used; all by default.
        noise: Standard deviation of what is added to every pixel, of training (anew each time) and of test images.
        shifts: Whether training images are moved by up to a pixel each way, test images likewise.
        batch: Of one rank.
        epochs: Of training; the learning rate is divided by ten after 1/2 and 3/4 of them.
        learning_rate: At the start.
    """

    network: Callable[[], nn.Sequential] = mlp
    train_images: int = 1198
    noise: float = 0.0
    shifts: bool = False
    batch: int = 32
    epochs: int = 60
    learning_rate: float = 0.1

    @property
    def decays(self) -> tuple[int, int]:
        return self.epochs // 2, self.epochs * 3 // 4

    @property
    def steps_per_epoch(self) -> int:
        return self.train_images // (self.batch * WORLD_SIZE)

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def interval(self) -> int:
        """Steps between two detections: a thirtieth of the run, as published (10 epochs of 300)."""
        return self.num_steps // 30


# The first is easy: heavy compression does as well as none. Each of the others is harder in one or two ways.
SETTINGS: dict[str, Setting] = {
    "all images": Setting(),
    "20 epochs": Setting(epochs=20),
    "noise": Setting(noise=0.4),
    "300 images": Setting(train_images=300, batch=8),
    "convolutions": Setting(network=convolutions, epochs=20),
    "convolutions, shifts": Setting(network=convolutions, epochs=40, shifts=True),
}
CHOSEN = "20 epochs"
PUBLISHED_ETA = 0.5


def fixed_methods() -> dict[str, Compressor | Controller]:
    """What a setting is chosen by: does it distinguish heavy compression from none?"""
    return {UNCOMPRESSED: Dense()} | {f"{name}: heavy": heavy for name, (_, heavy) in PAIRS.items()}


def methods(setting: Setting, etas: Sequence[float], intervals: Sequence[int]) -> dict[str, Compressor | Controller]:
    """Everything that is compared, by name. `intervals` in thirtieths of the run."""
    chosen: dict[str, Compressor | Controller] = {UNCOMPRESSED: Dense()}
    for name, (light, heavy) in PAIRS.items():
        chosen[f"{name}: light"] = light
        chosen[f"{name}: heavy"] = heavy
        for eta, times in itertools.product(etas, intervals):
            interval = times * setting.interval
            controller = Accordion(light=light, heavy=heavy, eta=eta, interval=interval, unit="steps")
            longer = f", interval {interval}" if times > 1 else ""
            chosen[f"{name}: Accordion, eta {eta:g}{longer}"] = controller
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


def images(seed: int, setting: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, split at random; pixels in [0, 1], centred."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.from_numpy(data.data).float() / 16 - 0.3
    y = torch.from_numpy(data.target).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(500 + seed))
    test = order[: len(y) // TEST_SHARE]
    train = order[len(y) // TEST_SHARE :][: setting.train_images]
    generator = torch.Generator().manual_seed(700 + seed)
    return x[train], y[train], spoilt(x[test], setting, generator), y[test]


def spoilt(x: Tensor, setting: Setting, generator: torch.Generator) -> Tensor:
    """Images with the setting's noise, moved as it asks."""
    if setting.shifts:
        padded = F.pad(x.view(-1, 8, 8), (1, 1, 1, 1), value=float(x.min()))
        right, down = torch.randint(3, (2, len(x), 1), generator=generator) + torch.arange(8)
        x = padded[torch.arange(len(x))[:, None, None], down[:, :, None], right[:, None, :]].reshape(len(x), 64)
    return x + setting.noise * torch.randn(x.shape, generator=generator) if setting.noise else x


def train(name: str, method: Compressor | Controller, seed: int, setting: Setting) -> DigitsRun:
    """The whole run; deterministic."""
    x, y, x_test, y_test = images(seed, setting)
    torch.manual_seed(seed)
    model = setting.network()
    optimizer = torch.optim.SGD(model.parameters(), setting.learning_rate, momentum=MOMENTUM, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, setting.decays, 0.1)
    clock = LoopClock(optimizer, setting.num_steps, setting.steps_per_epoch)
    ranks = ThreadedRanks(model, method, clock, WORLD_SIZE, seed)
    order = torch.Generator().manual_seed(900 + seed)
    light = 0.0
    for _ in range(setting.epochs):
        shuffled = torch.randperm(len(y), generator=order)
        x_epoch, y_epoch = spoilt(x[shuffled], setting, order), y[shuffled]
        for step in range(setting.steps_per_epoch):
            gradients = []
            for rank in range(WORLD_SIZE):
                first = (step * WORLD_SIZE + rank) * setting.batch
                part = slice(first, first + setting.batch)
                loss = F.cross_entropy(model(x_epoch[part]), y_epoch[part])
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
        light_share=light / setting.num_steps,
    )
