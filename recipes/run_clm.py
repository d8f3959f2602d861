"""Language model training as Hugging Face's example scripts do it: their argument classes, the Trainer, perplexity.

A GPT-2 from a configuration, no hub: tokens are bytes. The script knows nothing of compression; the launcher adds it.

accelerate launch --config_file recipes/configs/ddp.yaml recipes/run_clm.py --output_dir runs/clm --max_steps 100
torchrun --nproc-per-node 2 recipes/run_clm.py --output_dir runs/clm --max_steps 100     # uncompressed

Without a GPU put ACCELERATE_USE_CPU=true in front of accelerate.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

if __package__:
    from recipes.text import Split, Windows, standard_library
else:
    from text import Split, Windows, standard_library


@dataclass
class ModelArguments:
    """Which GPT-2."""

    n_embd: int = field(default=128)
    n_layer: int = field(default=4)
    n_head: int = field(default=4)


@dataclass
class DataArguments:
    """How much text."""

    block_size: int = field(default=128, metadata={"help": "bytes per sample"})
    max_train_samples: int = field(default=2048)
    max_eval_samples: int = field(default=128)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of text, each its own label."""

    def __init__(self, split: Split, data: DataArguments, limit: int) -> None:
        self.windows = Windows(standard_library(split), data.block_size, limit=limit)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.windows[index]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    parser.set_defaults(learning_rate=1e-3, per_device_train_batch_size=8, logging_steps=10, report_to="none")
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=data_args.block_size,
        n_embd=model_args.n_embd,
        n_layer=model_args.n_layer,
        n_head=model_args.n_head,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        training_args,
        train_dataset=Blocks("train", data_args, data_args.max_train_samples),
        eval_dataset=Blocks("validation", data_args, data_args.max_eval_samples),
    )
    folder = training_args.output_dir
    last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    result = trainer.train(resume_from_checkpoint=last)
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics | {"perplexity": math.exp(metrics["eval_loss"])})
    trainer.save_model()


if __name__ == "__main__":
    main()
