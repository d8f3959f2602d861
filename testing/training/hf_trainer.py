"""The Hugging Face Trainer with a small random transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from lowbit_strategy.transformers import attach
from testing.training.accelerated import Kind, fresh_state

STEPS = 8


def sequences() -> list[dict[str, torch.Tensor]]:
    """Counting in threes, from anywhere."""
    starts = torch.randint(0, 128, (64, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + 3 * torch.arange(32)) % 128
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(folder: Path, kind: Kind, plugin: Any = None, **options: Any) -> Trainer:
    fresh_state()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    if kind == "fsdp" and plugin is not None:
        options |= {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    defaults: dict[str, Any] = {"per_device_train_batch_size": 4, "report_to": "none", "max_steps": STEPS}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        logging_steps=1,
        save_steps=4,
        learning_rate=1e-3,
        disable_tqdm=True,
        **(defaults | options),
    )
    made = Trainer(LlamaForCausalLM(config), args, train_dataset=sequences())
    if plugin is not None:
        attach(made, plugin)
    return made


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
