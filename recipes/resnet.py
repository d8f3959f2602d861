"""A ResNet on handwritten digits under Lightning, with a monitor, a checkpoint and a test at the end.

python recipes/resnet.py --epochs 3
python recipes/resnet.py --epochs 3 --strategy ddp       # uncompressed, to compare
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from lowbit_strategy.lightning import CompressionMonitor


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


class ResNet(L.LightningModule):
    """Three stages of two blocks, for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(1, 32, 1), Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1), Block(64, 96, 2)]
        self.net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", self.accuracy(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_accuracy", self.accuracy(batch), sync_dist=True)

    def accuracy(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (self.net(x).argmax(1) == y).float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def digits() -> list[Dataset[tuple[Tensor, ...]]]:
    """1,797 images: train, validation, test."""
    images, targets = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(targets))
    return list(random_split(whole, (0.7, 0.15, 0.15), torch.Generator().manual_seed(0)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", default="loco_ddp")
    parser.add_argument("--out", default="runs/resnet")
    options = parser.parse_args()
    L.seed_everything(0)
    train, validation, test = digits()
    saving = ModelCheckpoint(monitor="val_accuracy", mode="max")
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=options.epochs,
        logger=CSVLogger(options.out),
        callbacks=[saving, *([] if options.strategy == "ddp" else [CompressionMonitor(every_n_steps=10)])],
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    trainer.fit(ResNet(), DataLoader(train, 32, shuffle=True), DataLoader(validation, 64))
    (result,) = trainer.test(dataloaders=DataLoader(test, 64), ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy {result['test_accuracy']:.3f}; figures in {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
