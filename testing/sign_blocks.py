"""Quantizers of one block to two values, transcribed in NumPy from their definitions."""

from __future__ import annotations

import numpy as np
import torch

from lowbit_strategy.kernels.reference.blocks import round_up_bfloat16

BLOCK = 64


def blocks(values: np.ndarray) -> list[np.ndarray]:
    return [values[start : start + BLOCK] for start in range(0, values.size, BLOCK)]


def up(value: float) -> np.float32:
    """A scale as it travels: bfloat16, rounded up."""
    return np.float32(round_up_bfloat16(torch.tensor(value, dtype=torch.float32)).item())


def nearest(value: float) -> np.float32:
    return np.float32(torch.tensor(value, dtype=torch.float32).bfloat16().item())


def scaled_sign(p: np.ndarray) -> np.ndarray:
    scale = up(np.abs(p).mean(dtype=np.float64))
    return np.where(p > 0, scale, -scale).astype(np.float32)


def two_means(p: np.ndarray) -> np.ndarray:
    positive = p >= 0
    means = [nearest(p[part].mean(dtype=np.float64)) if part.any() else np.float32(0) for part in (~positive, positive)]
    return np.where(positive, means[1], means[0]).astype(np.float32)
