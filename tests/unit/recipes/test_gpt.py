"""The model: causal, of the announced size, and it learns."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.gpt import GPT, LanguageModel
from recipes.text import Windows, standard_library


def test_a_prediction_sees_only_what_came_before() -> None:
    torch.manual_seed(0)
    model = GPT(width=16, depth=2, heads=2, context=8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] ^= 1
    same, other = model(tokens), model(changed)
    torch.testing.assert_close(same[0, :5], other[0, :5], rtol=0, atol=0)
    assert not torch.equal(same[0, 5], other[0, 5])


def test_size_is_about_twelve_depth_width_squared() -> None:
    model = GPT(width=256, depth=12, heads=4, context=64)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(12 * 12 * 256**2, rel=0.02)


def test_width_that_does_not_split_into_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="choose a multiple"):
        GPT(width=10, depth=1, heads=4, context=8)


def test_a_few_steps_bring_the_loss_down() -> None:
    L.seed_everything(0)
    model = LanguageModel(width=32, depth=1, heads=2, context=32, learning_rate=1e-2, warmup_steps=2)
    loader = DataLoader(Windows(standard_library("train"), 32, limit=640), batch_size=16)
    trainer = L.Trainer(
        max_steps=40,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    assert trainer.callback_metrics["train_loss"] < 3.5
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3, rel=0.05)  # a tenth, at the end
