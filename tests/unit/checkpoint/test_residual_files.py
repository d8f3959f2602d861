"""Residual files next to a checkpoint: whole or not there, found or refused, left or removed."""

from __future__ import annotations

import os
import random
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.capture import FORMAT
from lowbit_strategy.checkpoint.residual_files import MissingResidualFile, ResidualFile, ResidualFileError, SavePoint


def saved(
    step: int, rank: int = 0, world_size: int = 2, value: float = 1.0, run: str = "0a", skipped: int = 0
) -> dict[str, Any]:
    when = {"run": run, "step_index": step, "num_skipped": skipped}
    tensors = {"w": {"tensors": {"residual": torch.full((3,), value)}}}
    return {"format": FORMAT, "rank": rank, "world_size": world_size, "parameters": tensors} | when


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace_checkpoint(checkpoint: Path, state: dict[str, Any]) -> ResidualFile:
    """As rank 0 does: its file first, then the checkpoint, then what it replaces goes."""
    place = residual_files.save(checkpoint, state)
    replaced = [each for each in residual_files.files_of(checkpoint) if each.saved_at.is_before(place.saved_at)]
    residual_files.delete(checkpoint, replaced)
    return place


def load(checkpoint: Any, place: ResidualFile) -> dict[str, Any]:
    """As resuming does: the checkpoint knows no checksum."""
    return residual_files.load(checkpoint, place._replace(end=""))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "one.ckpt.lowbit"


def test_what_is_saved_is_loaded(checkpoint: Path, folder: Path) -> None:
    place = residual_files.save(checkpoint, saved(5, rank=1))
    loaded = load(checkpoint, place)
    assert loaded["parameters"]["w"]["tensors"]["residual"].tolist() == [1, 1, 1]
    assert len(names(folder)) == 1
    assert re.fullmatch(r"step-5-rank-1-of-2-0a\.0-[0-9a-f]{16}\.pt", names(folder)[0])


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_or_not_there(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_halfway(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    place = residual_files.save(checkpoint, saved(5))
    monkeypatch.setattr(torch, "save", die_halfway)
    for step in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            residual_files.save(checkpoint, saved(step))
    assert names(folder) == [place.name]
    assert load(checkpoint, place)["step_index"] == 5


def test_a_full_disk_leaves_nothing_behind_and_is_named(checkpoint: Path, folder: Path) -> None:
    place = residual_files.save(checkpoint, saved(5))
    large = saved(6) | {"extra": torch.zeros(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ResidualFileError) as caught:
            residual_files.save(checkpoint, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == [place.name]
    assert str(folder) in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert os.strerror(27) in str(caught.value)  # EFBIG
    assert "Free some space" in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResidualFileError, match=r"file/one\.ckpt\.lowbit \(NotADirectoryError"):
        residual_files.save(tmp_path / "file" / "one.ckpt", saved(5))


def test_a_run_leaves_the_files_of_another_until_it_has_replaced_their_checkpoint(checkpoint: Path) -> None:
    """Same path, same step: two runs, or one whose step was skipped and that saves again."""
    states = (saved(5, value=1.0), saved(5, value=2.0, run="0b"), saved(5, value=3.0, skipped=1))
    places = [residual_files.save(checkpoint, state) for state in states]
    for place, value in zip(places, (1, 2, 3), strict=True):
        assert load(checkpoint, place)["parameters"]["w"]["tensors"]["residual"].tolist() == [value] * 3


# -- removing ---------------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_replaces_goes(checkpoint: Path, folder: Path) -> None:
    """With what killed processes left; not what a rank that is ahead has saved since, or is about to."""
    for state in (saved(5), saved(5, rank=1), saved(9, run="0b")):
        residual_files.save(checkpoint, state)
    (folder / "step-7-rank-1-of-2-0b.0-0abc.part").touch()
    (folder / "step-9-rank-1-of-2-0a.0-0abc.part").touch()
    (folder / "notes.txt").touch()
    others = [residual_files.save(checkpoint, saved(step, rank=1)) for step in (8, 9)]
    new = replace_checkpoint(checkpoint, saved(8))
    kept = ["notes.txt", "step-9-rank-1-of-2-0a.0-0abc.part", new.name, *(each.name for each in others)]
    assert names(folder) == sorted(kept)


def test_moments_are_in_order_within_a_run() -> None:
    saved_at = SavePoint("0a", 5, 1)
    assert all(SavePoint(*earlier).is_before(saved_at) for earlier in (("0a", 4, 9), ("0a", 5, 0), ("0b", 9, 0)))
    assert not any(SavePoint(*later).is_before(saved_at) for later in (("0a", 5, 1), ("0a", 5, 2), ("0a", 6, 0)))


def test_saving_the_same_again_keeps_it(checkpoint: Path, folder: Path) -> None:
    place = replace_checkpoint(checkpoint, saved(5))
    assert replace_checkpoint(checkpoint, saved(5)) == place
    assert names(folder) == [place.name]


def test_rank_10_is_not_rank_1(checkpoint: Path, folder: Path) -> None:
    places = [residual_files.save(checkpoint, saved(5, rank, 11)) for rank in (1, 10)]
    residual_files.remove(checkpoint, 1, 11)
    assert names(folder) == [places[1].name]


def test_files_of_ranks_that_are_no_more_go_too(checkpoint: Path, folder: Path) -> None:
    for rank in range(3):
        residual_files.save(checkpoint, saved(5, rank, 3))
    new = [replace_checkpoint(checkpoint, saved(8, rank, 2)) for rank in (1, 0)]
    assert names(folder) == sorted(place.name for place in new)


def test_the_folder_goes_with_its_last_file(checkpoint: Path, folder: Path) -> None:
    for rank in (0, 1):
        residual_files.save(checkpoint, saved(5, rank))
    residual_files.remove(checkpoint, 1, 2)
    assert folder.exists()
    residual_files.remove(checkpoint, 0, 2)
    assert not folder.exists()
    residual_files.remove(checkpoint, 1, 2)  # nothing left to do


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run{1}"])
def test_a_path_is_not_a_pattern(tmp_path: Path, name: str) -> None:
    """Each of these, as a pattern, names ``run1`` too."""
    other, mine = tmp_path / "run1" / "last.ckpt", tmp_path / name / "last.ckpt"
    kept = residual_files.save(other, saved(5))
    replace_checkpoint(mine, saved(6))
    place = replace_checkpoint(mine, saved(7))
    assert names(tmp_path / name / "last.ckpt.lowbit") == [place.name]
    assert load(mine, place)["step_index"] == 7
    residual_files.remove(mine, 0, 2)
    assert not (tmp_path / name / "last.ckpt.lowbit").exists()
    assert load(other, kept)["step_index"] == 5


# -- refusing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"half of it", b"PK\x03\x04 not a whole archive"])
def test_a_damaged_file_is_an_error_that_says_what_to_do(checkpoint: Path, folder: Path, content: bytes) -> None:
    place = residual_files.save(checkpoint, saved(5))
    (folder / place.name).write_bytes(content)
    with pytest.raises(ResidualFileError, match=r'cannot be read .* pass on_missing_residual="reset"') as caught:
        load(checkpoint, place)
    assert str(folder / place.name) in str(caught.value)


def test_every_flipped_bit_is_noticed(checkpoint: Path, folder: Path) -> None:
    place = residual_files.save(checkpoint, saved(5))
    whole = (folder / place.name).read_bytes()
    chosen = random.Random(0)
    for _ in range(58):
        content, bit = bytearray(whole), chosen.randrange(8 * len(whole))
        content[bit // 8] ^= 1 << bit % 8
        (folder / place.name).write_bytes(content)
        with pytest.raises(ResidualFileError, match="its checksum is"):
            load(checkpoint, place)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (saved(5, rank=1), "holds the residuals of rank 1 of 2 at step 5"),
        (saved(5, world_size=3), "holds the residuals of rank 0 of 3 at step 5"),
        (saved(6), "holds the residuals of rank 0 of 2 at step 6"),
        (saved(5, run="0b"), "holds the residuals of rank 0 of 2 at step 5"),
        (
            saved(5) | {"format": 3},
            f"has format 3 and this version reads {FORMAT}: load it with the version that wrote",
        ),
        ({"weights": torch.ones(2)}, "is not a residual file"),
    ],
)
def test_another_file_in_its_place(checkpoint: Path, folder: Path, other: dict[str, Any], message: str) -> None:
    """By its checksum; and even one whose name has the right checksum is not taken."""
    place = residual_files.save(checkpoint, saved(5))
    torch.save(other, folder / place.name)
    with pytest.raises(ResidualFileError, match="its checksum is"):
        load(checkpoint, place)
    with (folder / place.name).open("rb") as file:
        forged = place._replace(end=f"{residual_files._checksum(file)}.pt")
    (folder / place.name).rename(folder / forged.name)
    with pytest.raises(ResidualFileError, match=message) as caught:
        load(checkpoint, place)
    assert str(folder) in str(caught.value)
    assert "on_missing_residual" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_residuals_that_are_not_finite(checkpoint: Path, value: float, dtype: torch.dtype) -> None:
    bad = saved(5)
    bad["parameters"]["w"]["tensors"]["residual"] = torch.tensor([0.0, value, 0.0], dtype=dtype)
    place = residual_files.save(checkpoint, bad)
    with pytest.raises(ResidualFileError, match=r"not finite, in parameters\.w\.tensors\.residual: .*reset"):
        load(checkpoint, place)


class _Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_nothing_in_a_file_is_run(checkpoint: Path, tmp_path: Path) -> None:
    place = residual_files.save(checkpoint, saved(5) | {"attack": _Attack(tmp_path / "executed")})
    with pytest.raises(ResidualFileError, match="cannot be read"):
        load(checkpoint, place)
    assert not (tmp_path / "executed").exists()


def test_a_file_that_may_not_be_read(checkpoint: Path, folder: Path) -> None:
    place = residual_files.save(checkpoint, saved(5))
    (folder / place.name).unlink()
    (folder / place.name).mkdir()  # the tests may run as root, whom no permission stops
    with pytest.raises(ResidualFileError, match=r"cannot be read .*directory"):
        load(checkpoint, place)


# -- finding ----------------------------------------------------------------------------------------------------------


def test_a_link_to_the_checkpoint_finds_its_residuals(checkpoint: Path, tmp_path: Path) -> None:
    checkpoint.touch()
    place = residual_files.save(checkpoint, saved(5))
    os.symlink(checkpoint, tmp_path / "last.ckpt")
    assert load(tmp_path / "last.ckpt", place)["step_index"] == 5


def test_a_link_in_the_file_of_a_checkpoint_that_has_left_residuals(checkpoint: Path, tmp_path: Path) -> None:
    residual_files.save(tmp_path / "last.ckpt", saved(3))
    checkpoint.mkdir()  # a folder of shards
    place = residual_files.save(checkpoint, saved(5))
    os.symlink(checkpoint, tmp_path / "last.ckpt")
    assert load(f"{tmp_path}/last.ckpt/", place)["step_index"] == 5


def test_linked_folders(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    """The folder around the checkpoint is a link, and so is that of its residuals."""
    (tmp_path / "latest").symlink_to(tmp_path, target_is_directory=True)
    place = residual_files.save(checkpoint, saved(5))
    folder.rename(tmp_path / "large-disk")
    folder.symlink_to(tmp_path / "large-disk", target_is_directory=True)
    assert load(tmp_path / "latest" / "one.ckpt", place)["step_index"] == 5
    residual_files.remove(tmp_path / "latest" / "one.ckpt", 0, 2)
    assert names(tmp_path / "large-disk") == []


def test_a_folder_of_shards_has_its_residuals_beside_it(tmp_path: Path) -> None:
    residual_files.save(f"{tmp_path}/shards.ckpt/", saved(5))
    assert names(tmp_path) == ["shards.ckpt.lowbit"]


@pytest.mark.parametrize("run", ["runs", "run[1]"])
def test_any_file_system_that_fsspec_knows(run: str) -> None:
    checkpoint = f"memory://{run}/one.ckpt"
    replace_checkpoint(checkpoint, saved(4))
    place = replace_checkpoint(checkpoint, saved(5))
    assert load(checkpoint, place)["step_index"] == 5
    assert residual_files.files_of(checkpoint) == [place]
    residual_files.remove(checkpoint, 0, 2)
    with pytest.raises(MissingResidualFile, match="is missing"):
        load(checkpoint, place)
