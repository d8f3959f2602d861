"""Explaining why a checkpoint did not load never runs anything that is in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lowbit_strategy.checkpoint.mismatch import explain_mismatch


class _Attack:
    """What a crafted file holds: unpickling it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def _load_safely(path: Path) -> None:
    with explain_mismatch(path, {"state_dict": nn.Linear(2, 3)}):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            raise RuntimeError("the framework's loader failed") from error


def test_a_crafted_checkpoint_is_not_executed(tmp_path: Path) -> None:
    path, target = tmp_path / "crafted.ckpt", tmp_path / "executed"
    torch.save({"state_dict": nn.Linear(4, 5).state_dict(), "attack": _Attack(target)}, path)
    with pytest.raises(RuntimeError, match="the framework's loader failed"):
        _load_safely(path)
    assert not target.exists()


def test_damaged_bytes_leave_the_frameworks_own_error(tmp_path: Path) -> None:
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(RuntimeError, match="the framework's loader failed"):
        _load_safely(path)


def test_another_models_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save({"state_dict": nn.Linear(4, 5).state_dict()}, path)
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="belongs to another model"), explain_mismatch(path, {"state_dict": model}):
        raise RuntimeError("size mismatch")
