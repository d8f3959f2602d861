"""An Accelerate job that goes on from its last checkpoint when it is started again; it knows nothing of compression.

``restartable.py FOLDER [KILL_AT]`` writes every step's loss, and the levels in force if something chooses them, to
``FOLDER/losses-RANK.txt``. With KILL_AT the second rank kills itself at that step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from lm import CONTEXT, VOCABULARY, Model, weights  # beside this file
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

FOLDER, KILL_AT = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
STEPS, EVERY, EPOCH = 10, 3, 5


def newest() -> int:
    """The last step that all was saved after; 0 if there is none."""
    return max((int(path.parent.name) for path in FOLDER.glob("*/complete")), default=0)


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Model()
    starts = torch.randint(0, VOCABULARY, (16 * EPOCH, 1), generator=torch.Generator().manual_seed(1))
    rows = (starts + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    data = DataLoader(TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), batch_size=8)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
    step = newest()
    if step:
        accelerator.load_state(str(FOLDER / str(step)))
        accelerator.print("from", step)
    while step < STEPS:
        for tokens, following in skip_first_batches(batches, step % EPOCH) if step % EPOCH else batches:
            if step == KILL_AT and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            driver = getattr(getattr(accelerator, "lowbit", None), "driver", None)
            levels = ",".join(map(str, driver.levels.values())) if driver is not None else ""
            with (FOLDER / f"losses-{accelerator.process_index}.txt").open("a") as file:
                file.write(f"{step} {loss.item().hex()}/{levels}\n")
            step += 1
            if step % EVERY == 0:
                accelerator.save_state(str(FOLDER / str(step)))
                accelerator.wait_for_everyone()
                (FOLDER / str(step) / "complete").touch()
    whole = [tensor.double().sum().item() for tensor in weights(model)]
    accelerator.print("finished", whole)
    model, optimizer = accelerator.free_memory(model, optimizer)  # DDP that outlives its gloo group may abort at exit
    accelerator.end_training()
    time.sleep(0.05)  # for gloo's threads, as `collectives/comm.py` does where it is imported


if __name__ == "__main__":
    main()
