"""Before the first step all ranks compare what they are about to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.zoo.composed import Partition
from lowbit_strategy.model.handshake import fingerprint, handshake, to_plain
from testing.processes.ranks import run_ranks


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


DIFFERENCES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "same": ({"x": 1}, {"x": 1}, ""),
    "value": ({"x": 1, "y": 2}, {"x": 1, "y": 3}, "rank 1 differs from rank 0 in y: 3 instead of 2"),
    "missing": ({"x": 1, "y": 2}, {"x": 1}, "rank 1 differs from rank 0 in y: None instead of 2"),
    "added": ({"x": 1}, {"x": 1, "z": 4}, "rank 1 differs from rank 0 in z: 4 instead of None"),
    "entry": ({"p": [("a", 1), ("b", 2)]}, {"p": [("a", 1), ("c", 2)]}, r"in p: number 1 is \('c', 2\) instead of"),
    "length": ({"p": [("a", 1), ("b", 2)]}, {"p": [("a", 1)]}, "in p: 1 instead of 2"),
}


def _meet(rank: int, world_size: int) -> list[str]:
    """What each comparison raises, if the last rank holds the second of the two; in a group of their own."""
    group, raised = dist.new_group(), []
    for first, second, _ in DIFFERENCES.values():
        try:
            handshake(second if rank == world_size - 1 else first, group)
            raised.append("")
        except RuntimeError as error:
            raised.append(str(error))
    return raised


def test_every_rank_names_the_first_difference() -> None:
    for world_size in (2, 3):
        for raised in run_ranks(_meet, world_size):
            for (_, _, wanted), text in zip(DIFFERENCES.values(), raised, strict=True):
                assert re.search(wanted.replace("rank 1", f"rank {world_size - 1}"), text) if wanted else text == "", (
                    text
                )
                assert not wanted or text.endswith("All ranks must run the same model, configuration and versions")
