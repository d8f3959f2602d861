"""Residual files beside a checkpoint: whole or not there, the right ones found, the others left or removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.residual_files import ResidualFileError


def saved(step: int, rank: int = 0, world_size: int = 2) -> dict[str, Any]:
    return {"step_index": step, "rank": rank, "world_size": world_size, "parameters": {"w": torch.full((3,), step)}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt.lowbit"


def test_what_is_saved_is_loaded(checkpoint: Path) -> None:
    residual_files.save(checkpoint, saved(5, rank=1))
    loaded = residual_files.load(checkpoint, 5, 1, 2)
    assert loaded["parameters"]["w"].tolist() == [5, 5, 5]


def test_a_file_is_whole_or_not_there(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_halfway(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    residual_files.save(checkpoint, saved(5))
    monkeypatch.setattr(torch, "save", die_halfway)
    for step in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            residual_files.save(checkpoint, saved(step))
    assert [name for name in names(folder) if not name.endswith(".part")] == ["step-5-rank-0-of-2.pt"]
    assert residual_files.load(checkpoint, 5, 0, 2)["step_index"] == 5
    with pytest.raises(ResidualFileError, match=r"step-6-rank-0-of-2\.pt is missing"):
        residual_files.load(checkpoint, 6, 0, 2)


def test_stale_files_go_only_after_the_new_checkpoint_and_only_ones_own(checkpoint: Path, folder: Path) -> None:
    for rank in (0, 1):
        residual_files.save(checkpoint, saved(5, rank))
    (folder / "step-5-rank-0-of-2.pt.abc.part").touch()
    residual_files.save(checkpoint, saved(8))
    assert (
        residual_files.load(checkpoint, 5, 0, 2)["step_index"] == 5
    )  # the checkpoint on disk may still be the old one
    residual_files.remove_stale(checkpoint, saved(8))
    assert names(folder) == ["step-5-rank-1-of-2.pt", "step-8-rank-0-of-2.pt"]


def test_rank_10_is_not_rank_1(checkpoint: Path, folder: Path) -> None:
    for rank in (1, 10):
        residual_files.save(checkpoint, saved(5, rank, 11))
    residual_files.remove(checkpoint, 1)
    assert names(folder) == ["step-5-rank-10-of-11.pt"]


def test_the_folder_goes_with_its_last_file(checkpoint: Path, folder: Path) -> None:
    for rank in (0, 1):
        residual_files.save(checkpoint, saved(5, rank))
    residual_files.remove(checkpoint, 0)
    assert folder.exists()
    residual_files.remove(checkpoint, 1)
    assert not folder.exists()
    residual_files.remove(checkpoint, 1)  # nothing left to do


@pytest.mark.parametrize("content", [b"", b"half of it", b"PK\x03\x04 not a whole archive"])
def test_a_damaged_file_is_an_error_that_says_what_to_do(checkpoint: Path, folder: Path, content: bytes) -> None:
    residual_files.save(checkpoint, saved(5))
    (folder / "step-5-rank-0-of-2.pt").write_bytes(content)
    with pytest.raises(ResidualFileError, match=r'cannot be read .* pass on_missing_residual="reset"'):
        residual_files.load(checkpoint, 5, 0, 2)


def test_something_else_under_the_name(checkpoint: Path, folder: Path) -> None:
    residual_files.save(checkpoint, saved(5))
    torch.save({"weights": torch.ones(2)}, folder / "step-5-rank-0-of-2.pt")
    with pytest.raises(ResidualFileError, match="is not a residual file"):
        residual_files.load(checkpoint, 5, 0, 2)


def test_a_link_to_the_checkpoint_finds_its_residuals(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.touch()
    residual_files.save(checkpoint, saved(5))
    os.symlink(checkpoint, tmp_path / "last.ckpt")
    assert residual_files.load(tmp_path / "last.ckpt", 5, 0, 2)["step_index"] == 5


def test_a_folder_of_shards_has_its_residuals_beside_it(tmp_path: Path) -> None:
    residual_files.save(f"{tmp_path}/shards.ckpt/", saved(5))
    assert names(tmp_path) == ["shards.ckpt.lowbit"]


def test_any_file_system_that_fsspec_knows() -> None:
    residual_files.save("memory://runs/one.ckpt", saved(5))
    assert residual_files.load("memory://runs/one.ckpt", 5, 0, 2)["step_index"] == 5
    residual_files.remove("memory://runs/one.ckpt", 0)
    with pytest.raises(ResidualFileError, match="is missing"):
        residual_files.load("memory://runs/one.ckpt", 5, 0, 2)
