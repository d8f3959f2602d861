"""The metrics: values, sums over ranks, reset, saving, use in a module."""

from __future__ import annotations

import doctest
import io
import math
import types
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn

from lowbit_strategy import metrics as energy
from lowbit_strategy import metrics as wire
from lowbit_strategy.metrics import (
    BitsPerElement,
    CompressionCosineSimilarity,
    CompressionGain,
    CompressionRatio,
    CompressionRelativeError,
    ResidualNorm,
    WireBytes,
)
from testing.processes.ranks import run_ranks

PAIRS = (CompressionRelativeError, CompressionCosineSimilarity, CompressionGain)


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    compensated = torch.randn(3, 50, generator=generator) * (1 + seed)
    return compensated, compensated + 0.3 * torch.randn(3, 50, generator=generator)


def expected(kind: type, compensated: torch.Tensor, sent: torch.Tensor) -> float:
    compensated, sent = compensated.double().flatten(), sent.double().flatten()
    return {
        CompressionRelativeError: (compensated - sent).norm() / compensated.norm(),
        CompressionCosineSimilarity: compensated @ sent / (compensated.norm() * sent.norm()),
        CompressionGain: (sent @ sent) / (compensated @ compensated),
    }[kind].item()


@pytest.mark.parametrize("kind", PAIRS)
def test_updates_add_up_to_one_of_everything(kind: type[torchmetrics.Metric]) -> None:
    metric = kind()
    pairs = [pair(seed) for seed in range(4)]
    for compensated, sent in pairs:
        metric.update(compensated, sent)
    together = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
    assert metric.compute().item() == pytest.approx(expected(kind, *together), rel=1e-9)
    metric.reset()
    metric.update(*pairs[0])
    assert metric.compute().item() == pytest.approx(expected(kind, *pairs[0]), rel=1e-9)


def on_rank(rank: int, world_size: int) -> list[float]:
    metrics: list[Any] = [kind() for kind in PAIRS]
    for seed in (rank, rank + world_size):
        for metric in metrics:
            metric.update(*pair(seed))
    bits, total, ratio, norm = BitsPerElement(), WireBytes(), CompressionRatio(), ResidualNorm()
    for metric in (bits, total, ratio):
        metric.update(nbytes=100 * (rank + 1), numel=500)
    for _ in range(2):
        norm.update([torch.full((4,), float(rank + 1))])
    return [metric.compute().item() for metric in (*metrics, bits, total, ratio, norm)]


def test_ranks_add_up() -> None:
    results = run_ranks(on_rank, 3)
    assert results[0] == results[1] == results[2]
    together = [torch.cat(parts) for parts in zip(*(pair(seed) for seed in range(6)), strict=True)]
    norm = math.sqrt(4 * (1 + 4 + 9))
    wanted = [expected(kind, *together) for kind in PAIRS] + [8 * 600 / 1500, 600, 4 * 1500 / 600, norm]
    assert results[0] == pytest.approx(wanted, rel=1e-9)


def test_nothing_to_send() -> None:
    zeros, something = torch.zeros(4), torch.ones(4)
    for kind, value in ((CompressionRelativeError, 0.0), (CompressionCosineSimilarity, 1.0), (CompressionGain, 1.0)):
        metric = kind()
        metric.update(zeros, zeros)
        assert metric.compute().item() == value
    silent = CompressionCosineSimilarity()
    silent.update(something, zeros)
    assert silent.compute().item() == 0.0


def test_states_are_saved() -> None:
    metric = CompressionRelativeError()
    metric.persistent(True)
    metric.update(*pair(0))
    buffer = io.BytesIO()
    torch.save(metric.state_dict(), buffer)
    buffer.seek(0)
    restored = CompressionRelativeError()
    restored.persistent(True)
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    for each in (metric, restored):
        each.update(*pair(1))
    assert restored.compute() == metric.compute()


def test_half_precision_modules_do_not_round_sums() -> None:
    metric = WireBytes().half()
    for _ in range(3):
        metric.update(nbytes=2**40 + 1)
    assert metric.compute().item() == 3 * (2**40 + 1)


def test_forward_gives_the_value_of_the_batch() -> None:
    metric = CompressionGain()
    metric.update(*pair(0))
    assert metric(*pair(1)).item() == pytest.approx(expected(CompressionGain, *pair(1)), rel=1e-9)


def test_collection_shares_states() -> None:
    collection = torchmetrics.MetricCollection([kind() for kind in PAIRS])
    for seed in range(3):
        collection.update(*pair(seed))
    assert len(collection.compute_groups) == 1
    assert set(collection.compute()) == {kind.__name__ for kind in PAIRS}


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="one shape"):
        CompressionGain().update(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="negative"):
        WireBytes().update(-1)


@pytest.mark.parametrize("module", [energy, wire])
def test_examples(module: types.ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


class Logging(L.LightningModule):
    """A user's own module that watches what rounding to bfloat16 loses of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.error = CompressionRelativeError()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for param in self.parameters():
            self.error.update(param.grad, param.grad.bfloat16())
        self.log("error", self.error, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_in_a_module_of_ones_own() -> None:
    model = Logging()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=3, enable_model_summary=False, **options)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4))
    assert 0 < trainer.callback_metrics["error"].item() < 0.01
