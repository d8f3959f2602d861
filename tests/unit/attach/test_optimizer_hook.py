"""Which steps of an optimizer can move something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowbit_strategy.attach.optimizer_hook import has_rate


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.1, True),
        (0.0, False),
        (torch.tensor(0.0), False),
        (torch.tensor(0.1), True),
        (torch.empty((), device="meta"), True),  # whose value cannot be read, as that on a GPU is not
    ],
)
def test_an_optimizer_has_a_rate(rate: Any, expected: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    assert has_rate(optimizer) is expected
