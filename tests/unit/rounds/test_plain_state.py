"""State that travels as JSON and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowbit_strategy.rounds.plain_state import packed, unpacked

STATE: dict[str, Any] = {
    "step": 3,
    "rates": [None, 0.1],
    "name": "tensor",
    "list": ["tensor", "torch.float32", [2]],
    "weights": {"a": torch.randn(3, 5), "b": torch.ones((), dtype=torch.int64), "c": torch.empty(0, 4)},
    "half": torch.randn(7).to(torch.bfloat16),
    "flag": True,
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def test_what_is_packed_comes_back() -> None:
    assert _same(unpacked(*packed(STATE)), STATE)


def test_a_state_that_is_cut_short_is_refused() -> None:
    description, data = packed(STATE)
    with pytest.raises(ValueError, match="shorter than its description"):
        unpacked(description, data[:-8])
    with pytest.raises(ValueError, match="longer than its description"):
        unpacked(description, torch.cat([data, data[:8]]))


def test_objects_do_not_travel() -> None:
    with pytest.raises(TypeError, match="cannot be sent to another replica"):
        packed({"code": print})
