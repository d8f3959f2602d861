"""A Trainer script as in the documentation of transformers: nothing in its training knows of compression."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def trainer(folder: Path) -> Trainer:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    starts = torch.randint(0, 128, (64, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + 3 * torch.arange(32)) % 128
    return Trainer(LlamaForCausalLM(config), args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def weights(trained: Trainer) -> list[float]:
    parameters = trained.model.parameters()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).double().sum().item() for p in parameters]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    whole = trainer(out / "whole")
    whole.train()
    facts = {"losses": losses(whole), "bits": weights(whole), "model": type(whole.model_wrapped).__name__}
    if (sync := getattr(getattr(whole.accelerator, "lowbit", None), "sync", None)) is not None:
        facts |= {"steps": sync.step_index, "sent": sync.ranks.peers.sent_nbytes}
        facts["account"] = sum(sync.state.sent_nbytes(name) for name in sync.specs)
    again = trainer(out / "again")
    again.train(resume_from_checkpoint=str(out / "whole" / "checkpoint-4"))
    facts["resumed"] = losses(again) == losses(whole) and weights(again) == facts["bits"]
    (out / f"rank-{whole.args.process_index}.json").write_text(json.dumps(facts))
    accelerator = again.accelerator
    del whole, again
    accelerator.free_memory()  # DDP that outlives its gloo group may abort at exit
    accelerator.end_training()
    time.sleep(0.05)  # for gloo's threads, as `collectives/comm.py` does where it is imported


if __name__ == "__main__":
    main()
