"""A small GPT on real text with Accelerate. Nothing in this script knows of compression: the configuration file does.

    accelerate launch --config_file recipes/configs/ddp.yaml recipes/accelerate_lm.py --steps 200

Without a GPU put ACCELERATE_USE_CPU=true in front.

To turn compression on in the script instead, add one line after the Accelerator is made:

    LowBitPlugin(LoCo(bits=4)).attach(accelerator)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

if __package__:
    from recipes.gpt import GPT
    from recipes.text import Windows, standard_library
else:
    from gpt import GPT
    from text import Windows, standard_library

CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder to save the state to at the end")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    model = GPT(width=128, depth=4, heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Windows(standard_library("train"), CONTEXT, limit=8 * options.steps * accelerator.num_processes)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=8))

    for step, (tokens, following) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == options.steps:
            mean = accelerator.gather(loss.detach().view(1)).mean().item()
            accelerator.print(f"step {step:5d}  loss {mean:.4f}")
    if options.save is not None:
        accelerator.save_state(str(options.save))
    model, optimizer = accelerator.free_memory(model, optimizer)  # DDP that outlives its gloo group may abort at exit
    accelerator.end_training()


if __name__ == "__main__":
    main()
