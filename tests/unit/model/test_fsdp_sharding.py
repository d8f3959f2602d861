"""What FSDP2 shards by itself, and what it leaves to the module around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit_strategy.model.fsdp_sharding import _called_children, _check_children, blocks_to_shard, materialize


def names(module: nn.Module, min_numel: int) -> list[str]:
    by_id = {id(child): name for name, child in module.named_modules()}
    return [by_id[id(block)] for block in blocks_to_shard(module, min_numel)]


def layer() -> nn.Linear:
    return nn.Linear(10, 10, bias=False)


def test_large_entries_of_lists_and_sequences() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([layer(), layer()]), "head": layer()})
    model = nn.Sequential(nn.ModuleList([layer(), nn.Linear(2, 2)]), layer())
    assert names(model, 100) == ["1", "0.0"]
    assert names(model, 101) == []


def test_inner_blocks_come_before_those_around_them() -> None:
    stage = nn.Sequential(layer(), layer())
    model = nn.ModuleList([stage, layer()])
    assert names(model, 100) == ["1", "0.0", "0.1", "0"]
    assert names(model, 200) == ["0"]


def test_lists_are_never_called() -> None:
    model = nn.ModuleList([nn.ModuleList([layer()])])
    assert names(model, 100) == ["0.0"]


def test_tied_blocks_are_left_to_the_module_around_them() -> None:
    blocks = nn.ModuleList([layer(), layer(), layer()])
    blocks[2].weight = blocks[0].weight
    assert names(nn.ModuleDict({"blocks": blocks}), 100) == []
    model = nn.Module()
    model.blocks = blocks
    assert names(model, 100) == ["blocks.1"]


def test_sharing_inside_a_block_is_no_obstacle() -> None:
    twice = nn.Sequential(layer(), layer())
    twice[1].weight = twice[0].weight
    model = nn.Module()
    model.blocks = nn.ModuleList([twice])
    assert names(model, 100) == ["blocks.0"]


@pytest.mark.parametrize("name", ["experts", "local_experts", "Experts"])
def test_experts_are_left_to_the_module_around_them(name: str) -> None:
    block = nn.Module()
    block.attention = layer()
    block.add_module(name, nn.ModuleList([nn.Sequential(layer(), layer()), layer()]))
    model = nn.Module()
    model.blocks = nn.ModuleList([block])
    assert names(model, 100) == ["blocks.0"]


def test_entries_of_dicts_are_left_to_the_module_around_them() -> None:
    model = nn.Module()
    model.tasks = nn.ModuleDict({"a": nn.Sequential(layer(), layer()), "b": layer()})
    assert names(model, 100) == []


def test_children_that_are_called_when_the_module_is_not_sharded() -> None:
    model = nn.Module()
    model.generator = layer()
    model.critics = nn.ModuleList([layer(), layer()])
    model.loss = nn.MSELoss()
    assert _called_children(model) == [model.generator, model.critics[0], model.critics[1]]
    _check_children(model, _called_children(model))
    model.critics[1].weight = model.critics[0].weight
    with pytest.raises(ValueError, match=r"critics\.0\.weight is shared by several of its children"):
        _check_children(model, _called_children(model))
    model.critics, model.scale = nn.ModuleList(), nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="scale belongs to the module itself"):
        _check_children(model, _called_children(model))


def test_materialize_gives_meta_tensors_values_and_leaves_others() -> None:
    model = nn.Sequential(layer(), layer())
    with torch.device("meta"):
        model[0] = layer()
    kept = model[1].weight.detach().clone()
    materialize(model, torch.device("cpu"))
    assert not model[0].weight.is_meta
    assert model[0].weight.abs().max() <= 10**-0.5
    assert torch.equal(model[1].weight, kept)


def test_materialize_says_what_has_no_values() -> None:
    model = nn.Module()
    with torch.device("meta"):
        model.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"the model \(Module\) is on the meta device and has no reset_parameters\(\)"):
        materialize(model, torch.device("cpu"))
