"""Trains in forked processes, as in a notebook; then saves and resumes in the process that forked them."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lowbit_strategy.lightning import LowBitDDPStrategy
from testing.training.regression import ByStep, loader

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 2,
}


def trainer(max_steps: int) -> L.Trainer:
    saver = ModelCheckpoint("saved", every_n_train_steps=3, filename="{step}", save_top_k=-1)
    return L.Trainer(strategy=LowBitDDPStrategy(start_method="fork"), max_steps=max_steps, callbacks=[saver], **QUIET)


if __name__ == "__main__":
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("lowbit_strategy").addHandler(handler)
    first = trainer(3)
    first.fit(ByStep(), loader())
    print("with residuals", len(list(Path("saved/step=3.ckpt.lowbit").glob("step-3-*"))))
    first.save_checkpoint("outside.ckpt")
    print("warned", any("this checkpoint has no residuals" in text for text in warnings))
    second = trainer(6)
    second.fit(ByStep(), loader(), ckpt_path="saved/step=3.ckpt")
    print("resumed", len(list(Path("saved/step=6.ckpt.lowbit").glob("step-6-*"))))
