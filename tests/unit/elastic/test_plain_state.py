"""State that travels from one replica to another."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit_strategy.elastic.plain_state import receive, send

STATE: dict[str, Any] = {
    "step": 3,
    "rates": [None, 0.1],
    "name": "tensor",
    "weights": {"a": torch.randn(3, 5), "b": torch.ones((), dtype=torch.int64), "c": torch.empty(0, 4)},
    "half": torch.randn(7).to(torch.bfloat16),
    "flag": True,
}


class Line:
    """Messages from one member to another."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []

    def send(self, x: Tensor, target: int) -> Line:
        self.messages.append(x.clone())
        return self

    def receive(self, x: Tensor, source: int) -> Line:
        x.copy_(self.messages.pop(0))
        return self

    def wait(self) -> None:
        """Messages are there at once."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def test_what_is_sent_arrives() -> None:
    line: Any = Line()
    send(STATE, line, 1)
    assert _same(receive(line, 0), STATE)


def test_a_part_of_a_large_tensor_travels_alone() -> None:
    line: Any = Line()
    large = nn.Parameter(torch.randn(1 << 20))
    send([large[:100]], line, 1)
    assert line.messages[1].numel() < 4 * 100 + 2000
    (part,) = receive(line, 0)
    assert torch.equal(part, large[:100])
    assert not part.requires_grad


def test_what_arrives_runs_no_code() -> None:
    line: Any = Line()
    data = torch.frombuffer(bytearray(pickle.dumps({"code": print})), dtype=torch.uint8)
    line.messages = [torch.tensor([data.numel()]), data]
    with pytest.raises(ValueError, match="a state that has arrived is damaged"):
        receive(line, 0)


def test_objects_do_not_travel() -> None:
    with pytest.raises(TypeError, match="cannot be sent to another replica"):
        send({"code": print}, Line(), 1)  # type: ignore[arg-type]
