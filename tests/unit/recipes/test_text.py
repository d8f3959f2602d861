"""The text: whole files to one split or the other, the same bytes every time, windows that cover it."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest
import torch

from recipes.text import Windows, split_of, standard_library


def test_the_splits_hold_different_files_and_are_python() -> None:
    train, validation = standard_library("train"), standard_library("validation")
    assert train.dtype == validation.dtype == torch.uint8
    assert 5 < train.numel() / validation.numel() < 20
    ast_py = Path(sysconfig.get_paths()["stdlib"], "ast.py").read_bytes()
    holder = standard_library(split_of(Path("ast.py")))
    assert bytes(holder.numpy()).count(ast_py) == 1
    other = train if holder is validation else validation
    assert ast_py not in bytes(other.numpy())
    assert ast.parse(ast_py)


def test_every_byte_but_the_tail_is_in_one_window() -> None:
    windows = Windows(torch.arange(23, dtype=torch.uint8), context=5)
    assert len(windows) == 4
    x, y = windows[1]
    assert x.tolist() == [5, 6, 7, 8, 9]
    assert y.tolist() == [6, 7, 8, 9, 10]
    assert torch.cat([x for x, _ in windows]).tolist() == list(range(20))


def test_a_limit_spreads_the_windows() -> None:
    windows = Windows(torch.arange(101, dtype=torch.uint8), context=10, limit=3)
    assert [x[0].item() for x, _ in windows] == [0, 30, 60]


def test_a_text_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="no window of 5"):
        Windows(torch.zeros(5, dtype=torch.uint8), context=5)
