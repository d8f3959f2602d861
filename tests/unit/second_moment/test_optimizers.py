"""Which optimizers have a second moment that can be corrected."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam

from lowbit_strategy.second_moment.optimizers import check_decay


def test_a_weight_decay_within_the_gradient_is_refused() -> None:
    param = nn.Parameter(torch.zeros(8))
    for optimizer in (AdamW([param]), Adam([param]), NAdam([param], weight_decay=0.1, decoupled_weight_decay=True)):
        check_decay(optimizer)
    with pytest.raises(ValueError, match="take AdamW"):
        check_decay(Adam([param], weight_decay=0.1))
    check_decay(SGD([param], lr=0.1))
