"""Which optimizers have a second moment that can be corrected."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam

from lowbit_strategy.second_moment.optimizers import check_second_moment


def test_with_local_steps_a_weight_decay_within_the_gradient_is_refused() -> None:
    param = nn.Parameter(torch.zeros(8))
    for optimizer in (AdamW([param]), Adam([param]), NAdam([param], weight_decay=0.1, decoupled_weight_decay=True)):
        check_second_moment(optimizer, local_steps=True)
    decayed = Adam([param], weight_decay=0.1)
    check_second_moment(decayed, local_steps=False)
    with pytest.raises(ValueError, match="use AdamW"):
        check_second_moment(decayed, local_steps=True)


def test_an_optimizer_without_one_is_refused() -> None:
    param = nn.Parameter(torch.zeros(8))
    for optimizer in (SGD([param], lr=0.1), Adam([param], amsgrad=True)):
        with pytest.raises(ValueError, match="needs an optimizer that keeps exp_avg_sq"):
            check_second_moment(optimizer, local_steps=False)
