"""What must be the same on all ranks is told as plain values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.zoo.composed import Partition
from lowbit_strategy.model.fingerprint import fingerprint, to_plain


def is_wide(spec: TensorSpec) -> bool:
    return spec.numel > 100


def describe(module: nn.Module | None = None, compressor: Any = None, **settings: object) -> dict[str, object]:
    module = nn.Linear(3, 4) if module is None else module
    return fingerprint(LoCo() if compressor is None else compressor, module, scatter=False, settings=settings)


def test_facts_are_what_must_be_the_same() -> None:
    found = describe(nn.Linear(3, 4).bfloat16(), LoCo(bits=3), seed=5)
    assert found["torch version"] == torch.__version__
    assert found["strategy"] == "ddp"
    assert found["compressor"] == "LoCo"
    assert found["compressor.bits"] == "3"
    assert found["seed"] == 5
    assert found["parameters"] == [("weight", (4, 3)), ("bias", (4,))]
    assert found["parameter types"] == [("weight", "torch.bfloat16"), ("bias", "torch.bfloat16")]


def test_frozen_parameters_are_nobodys_business() -> None:
    module = nn.Linear(3, 4)
    module.bias.requires_grad_(False)
    assert describe(module)["parameters"] == [("weight", (4, 3))]


def test_floating_point_buffers_are_averaged_or_broadcast_so_they_count() -> None:
    module = nn.BatchNorm1d(7)
    assert describe(module)["floating-point buffers"] == [("running_mean", (7,)), ("running_var", (7,))]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_configuration_is_plain_values_that_tell_it_from_others(name: str) -> None:
    """What is compared must pickle, must not contain addresses, and must differ where configurations do."""
    here = to_plain("compressor", PRESETS[name])
    assert all(isinstance(value, str) for value in here.values())
    assert not [value for value in here.values() if re.search(r"0x[0-9a-f]{6,}", str(value))]
    same = [other for other in sorted(PRESETS) if to_plain("compressor", PRESETS[other]) == here]
    assert same == [other for other in sorted(PRESETS) if PRESETS[other] == PRESETS[name]]
    assert len(same) == (2 if name in ("loco", "loco4") else 1)  # two names of one configuration


def test_functions_go_by_name_and_nested_configurations_by_their_fields() -> None:
    rules = Partition(rules=((is_wide, QSGD(bits=6)),), default=LoCo(bits=2))
    found = to_plain("compressor", rules)
    assert found["compressor.rules[0][0]"] == "is_wide"
    assert found["compressor.rules[0][1].bits"] == "6"
    assert found["compressor.default.bits"] == "2"
    assert found["compressor.rules"] == "1 entries"
