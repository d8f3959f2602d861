"""Ray Train: two workers, on any machines of a Ray cluster, train the small GPT under Lightning, compressed.

    pip install "ray[train]"
    python -m recipes.ray_train --workers 2 --steps 60

Ray starts the workers and sets their process group up; its `RayDDPStrategy` tells Lightning so. `LowBitDDPStrategy` in
front of it adds the compression. Ray sets LOCAL_WORLD_SIZE, so that two levels know which workers share a machine.

Ray's callback collects what lies in each worker's own folder. Residuals of workers on other machines than the first
one's stay behind, of which a warning tells after a restart; a `ModelCheckpoint` on a folder that all machines share
keeps them.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import lightning as L
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

from lowbit_strategy.lightning import LowBitDDPStrategy
from recipes.gpt import LanguageModel
from recipes.text import Windows, standard_library


class RayLowBitDDPStrategy(LowBitDDPStrategy, RayDDPStrategy):
    """Ray's processes, our gradients."""


def train_on_worker(config: dict[str, Any]) -> None:
    """What each worker runs."""
    L.seed_everything(0)
    windows = Windows(standard_library("train"), context=config["context"])
    trainer = L.Trainer(
        strategy=RayLowBitDDPStrategy(config["compressor"]),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        accelerator="auto",
        devices="auto",
        max_steps=config["steps"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model, batches = LanguageModel(context=config["context"]), DataLoader(windows, batch_size=8, shuffle=True)
    earlier = ray.train.get_checkpoint()  # Ray has started the workers anew after a failure
    with contextlib.nullcontext() if earlier is None else earlier.as_directory() as folder:
        saved = None if folder is None else f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}"
        prepare_trainer(trainer).fit(model, batches, ckpt_path=saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compressor", default="loco")
    parser.add_argument("--gpu", action="store_true", help="one GPU per worker")
    parser.add_argument("--storage", default=None, help="folder that all machines see, or a bucket")
    options = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    done = TorchTrainer(
        train_on_worker,
        train_loop_config={"steps": options.steps, "compressor": options.compressor, "context": 64},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    print(done.metrics)


if __name__ == "__main__":
    main()
