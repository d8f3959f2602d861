"""LoRA with peft on a Llama-shaped model: only the adapters are trained, so only they are synchronized.

torchrun --nproc-per-node 2 recipes/lora.py --steps 60
torchrun --nproc-per-node 2 recipes/lora.py --steps 60 --strategy ddp       # uncompressed, to compare
"""

from __future__ import annotations

import argparse
import os

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

if __package__:
    from recipes.text import Windows, standard_library
else:
    from text import Windows, standard_library

CONTEXT = 128


class Adapted(L.LightningModule):
    """A frozen base with adapters of rank 8 in its attention."""

    def __init__(self) -> None:
        super().__init__()
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
            )
        )
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.model = get_peft_model(base, adapters)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, _ = batch
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="loco_ddp")
    options = parser.parse_args()
    L.seed_everything(0)
    module = Adapted()
    trained, whole = module.model.get_nb_trainable_parameters()
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # torchrun's number of machines
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = Windows(standard_library("train"), CONTEXT, limit=16 * options.steps)
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(f"trained {trained:,} of {whole:,} parameters, loss {float(trainer.callback_metrics['train_loss']):.4f}")


if __name__ == "__main__":
    main()
