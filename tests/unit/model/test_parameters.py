"""A module's parameters as methods see them: names that wrappers do not change, shapes, roles."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.model.parameters import (
    canonical_name,
    describe_parameters,
    refuse_sparse_gradients,
    trainable_parameters,
)


class Language(nn.Module):
    """An embedding, a block, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = False, head: str = "lm_head", vocabulary: int = 50, out: int = 50) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.add_module(head, nn.Linear(8, out, bias=False))
        if tied:
            self.get_submodule(head).weight = self.tokens.weight


def roles(module: nn.Module) -> dict[str, str]:
    return {spec.name: spec.role for spec in describe_parameters(module) if spec.role != "other"}


def test_names_shapes_and_order_are_those_of_the_module() -> None:
    specs = describe_parameters(Language())
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("tokens.weight", (50, 8)),
        ("block.0.weight", (8, 8)),
        ("block.0.bias", (8,)),
        ("block.1.weight", (8,)),
        ("block.1.bias", (8,)),
        ("lm_head.weight", (50, 8)),
    ]


def test_wrappers_do_not_change_names() -> None:
    plain = describe_parameters(Language())
    model = Language()
    model.block = checkpoint_wrapper(model.block)
    compiled = torch.compile(model)
    assert any("_checkpoint_wrapped_module" in name for name, _ in compiled.named_parameters())
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert describe_parameters(compiled) == plain


@given(st.lists(st.sampled_from(["a", "weight", "0", "_orig_mod", "_checkpoint_wrapped_module"]), min_size=1))
def test_canonical_names_stay_as_they_are(parts: list[str]) -> None:
    once = canonical_name(".".join(parts))
    assert canonical_name(once) == once
    assert once.split(".") == [part for part in parts if not part.startswith("_")] or not once


def test_tied_parameters_are_one() -> None:
    model = Language(tied=True)
    assert [spec.name for spec in describe_parameters(model)].count("tokens.weight") == 1
    assert "lm_head.weight" not in trainable_parameters(model)


def test_frozen_parameters_are_left_out_unless_they_are_asked_for() -> None:
    model = Language()
    model.tokens.weight.requires_grad_(False)
    assert "tokens.weight" not in [spec.name for spec in describe_parameters(model)]
    assert "tokens.weight" not in trainable_parameters(model)
    assert describe_parameters(model, also={"tokens.weight"})[0].name == "tokens.weight"


@pytest.mark.parametrize("head", ["lm_head", "output_projection", "classifier", "score", "head"])
def test_heads_are_known_by_name(head: str) -> None:
    assert roles(Language(head=head, out=7)) == {"tokens.weight": "embedding", f"{head}.weight": "head"}


def test_the_last_layer_is_a_head_if_it_is_as_wide_as_the_vocabulary() -> None:
    assert roles(Language(head="out")) == {"tokens.weight": "embedding", "out.weight": "head"}
    assert roles(Language(head="out", out=49)) == {"tokens.weight": "embedding"}


def test_a_layer_as_wide_as_the_vocabulary_is_no_head_in_the_middle() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    assert roles(model) == {"0.weight": "embedding"}


def test_a_weight_that_is_tied_is_an_embedding() -> None:
    assert roles(Language(tied=True)) == {"tokens.weight": "embedding"}


def test_parametrized_weights_are_not_computed() -> None:
    """Spectral normalization takes a step of its own whenever its weight is read."""
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32))
    for module in model:
        spectral_norm(module)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    roles = [spec.role for spec in describe_parameters(model) if len(spec.shape) > 1]
    refuse_sparse_gradients(model)
    assert roles == ["embedding", "other", "head"]
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_embedding_bags_are_embeddings() -> None:
    assert roles(nn.Sequential(nn.EmbeddingBag(20, 4))) == {"0.weight": "embedding"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_that_gradients_are_reduced_in(dtype: torch.dtype) -> None:
    assert len(describe_parameters(Language().to(dtype))) == 6


def test_another_type_is_refused_by_name_with_what_to_do() -> None:
    model = Language()
    model.block[0].double()
    with pytest.raises(ValueError, match=r"block\.0\.weight is torch\.float64.*Convert it.*freeze it"):
        describe_parameters(model)
    model.block[0].requires_grad_(False)  # the advice helps
    assert "block.0.weight" not in [spec.name for spec in describe_parameters(model)]


@given(st.lists(st.integers(0, 9), max_size=5))
def test_a_spec_knows_its_size(shape: list[int]) -> None:
    spec = TensorSpec("p", tuple(shape))
    assert spec.numel == torch.empty(shape).numel() == math.prod(shape)
    assert spec.ndim == len(shape)


def test_lazy_modules_need_a_forward_pass_first() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh())
    with pytest.raises(ValueError, match=r"parameter 0\.weight has no shape yet: run one forward pass"):
        describe_parameters(model)
    model(torch.zeros(2, 4))
    assert [spec.shape for spec in describe_parameters(model)] == [(8, 4), (8,)]
