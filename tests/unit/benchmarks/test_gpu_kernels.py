"""The sweep over launches of the GPU kernels: in parts that fit into ten minutes, and no launch's error ends it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from benchmarks import gpu_kernels


def test_parts_of_the_sweep_are_disjoint_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"loco {i}" for i in range(20)]
    works(
        monkeypatch, [gpu_kernels.Work(name=name, nbytes=1, run=lambda i, launch: None, launches=()) for name in names]
    )
    parts = [gpu_kernels.measure(8, 1, "", sweep=False, shard=i, of=4)["rows"] for i in range(4)]
    assert sorted(row["name"] for rows in parts for row in rows) == sorted(names)
    assert max(map(len, parts)) < 20


def test_a_launch_that_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's OutOfResources is no RuntimeError."""

    class OutOfResources(Exception):
        pass

    def run(i: int, launch: object) -> None:
        if launch == "huge":
            raise OutOfResources("shared memory")

    works(monkeypatch, [gpu_kernels.Work(name="loco", nbytes=1, run=run, launches=("huge", "small"))])
    rows = gpu_kernels.measure(8, 1, "", sweep=True)["rows"]
    assert [row["launch"] for row in rows] == ["default", "small"]


def test_parts_are_named_as_fractions() -> None:
    assert gpu_kernels.shard_of("7/8") == (7, 8)
    for text in ("8/8", "1", "a/b", "-1/2"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be i/n"):
            gpu_kernels.shard_of(text)


def works(monkeypatch: pytest.MonkeyPatch, wanted: list[gpu_kernels.Work]) -> None:
    """Time these instead of kernels, without a GPU."""

    def make(numel: int) -> Iterator[gpu_kernels.Work]:
        yield from wanted

    def once(run: object, repeats: int) -> float:
        run(0)  # type: ignore[operator]
        return 1.0

    monkeypatch.setattr(gpu_kernels, "loco_work", make)
    for other in ("encode_work", "decode_work", "dense_work"):
        monkeypatch.setattr(gpu_kernels, other, lambda numel: iter(()))
    monkeypatch.setattr(gpu_kernels, "median_ms", once)
    monkeypatch.setattr(gpu_kernels, "copy_gb_per_s", lambda numel, repeats: 1.0)
    monkeypatch.setattr(gpu_kernels.torch.cuda, "get_device_name", lambda: "none")
