"""A small randomly initialized Llama on real text with the Hugging Face Trainer; compression in one line.

torchrun --nproc-per-node 2 recipes/hf_trainer_lm.py --steps 100
torchrun --nproc-per-node 2 recipes/hf_trainer_lm.py --steps 100 --resume        # from the last checkpoint
accelerate launch --config_file recipes/configs/ddp.yaml recipes/hf_trainer_lm.py --plain     # without the line

Without a GPU put ACCELERATE_USE_CPU=true in front of accelerate.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from lowbit_strategy import LoCo
from lowbit_strategy.transformers import attach

if __package__:
    from recipes.text import Windows, standard_library
else:
    from text import Windows, standard_library

CONTEXT = 128


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Windows of text as a causal language model of transformers wants them."""

    def __init__(self, num_samples: int) -> None:
        self.windows = Windows(standard_library("train"), CONTEXT, limit=num_samples)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.windows[index]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/hf_trainer_lm")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--plain", action="store_true", help="leave compression to the launcher, or out")
    options = parser.parse_args()

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    )
    arguments = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=50,
        save_total_limit=2,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Bytes(16 * options.steps))
    if not options.plain:
        attach(trainer, LoCo(bits=4))
    trainer.train(resume_from_checkpoint=options.resume or None)
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()  # DDP that outlives its gloo group may abort at exit
    accelerator.end_training()


if __name__ == "__main__":
    main()
