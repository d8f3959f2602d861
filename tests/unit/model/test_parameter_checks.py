"""What is known of a model's parameters: roles, memory order, what cannot be served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowbit_strategy.collectives.layout import MemoryOrder, in_memory_order
from lowbit_strategy.model.parameters import describe_parameters, refuse_sparse_gradients


def roles(module: nn.Module) -> dict[str, str]:
    return {spec.name: spec.role for spec in describe_parameters(module) if spec.role != "other"}


# -- roles ------------------------------------------------------------------------------------------------------------


def test_heads_by_name_and_as_wide_as_the_vocabulary() -> None:
    named = nn.ModuleDict({"body": nn.Linear(4, 4), "score": nn.Linear(4, 2), "last": nn.Linear(4, 4)})
    assert roles(named) == {"score.weight": "head"}
    assert roles(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))) == {"0.weight": "embedding", "1.weight": "head"}


def test_heads_by_what_the_model_itself_calls_its_output() -> None:
    """With other linear layers after it, under a name that means nothing, in a wrapper."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.value = nn.Linear(4, 7), nn.Linear(4, 1)

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    assert roles(nn.ModuleDict({"model": Model()})) == {"model.out.weight": "head"}

    class Vision(nn.Module):
        def __init__(self, head: Any) -> None:
            super().__init__()
            self.fc, self.distilled = nn.Linear(4, 7), nn.Linear(4, 7)
            self.head_of = head

        def get_classifier(self) -> Any:
            return self.head_of(self)

    def fail(model: nn.Module) -> nn.Module:
        raise NotImplementedError

    assert roles(Vision(lambda model: model.fc)) == {"fc.weight": "head"}
    assert roles(Vision(lambda model: nn.Identity())) == {}
    assert roles(Vision(fail)) == {}


def test_the_head_of_a_transformer_under_another_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=8, tie_word_embeddings=False)
    assert roles(GPT2LMHeadModel(config)) == {
        "transformer.wte.weight": "embedding",
        "transformer.wpe.weight": "embedding",
        "lm_head.weight": "head",
    }


# -- memory order -----------------------------------------------------------------------------------------------------


def order(param: torch.Tensor) -> MemoryOrder:
    module = nn.Module()
    module.register_parameter("param", nn.Parameter(param))
    return describe_parameters(module)[0].memory_order


def test_memory_order_is_that_of_the_strides() -> None:
    x = torch.randn(4, 3, 2, 5)
    assert order(x) is None
    assert order(x.to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert order(torch.randn(3, 4).t()) == (1, 0)
    assert order(torch.randn(8, 8)[:, ::2]) is None  # with gaps: DDP's bucket has it in order


@pytest.mark.parametrize("source", [None, (0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("target", [None, (0, 2, 3, 1), (2, 0, 3, 1)])
def test_values_are_brought_from_one_order_into_another(source: MemoryOrder, target: MemoryOrder) -> None:
    x = torch.randn(4, 3, 2, 5)

    def flat(memory_order: MemoryOrder) -> torch.Tensor:
        return x.permute(memory_order or (0, 1, 2, 3)).reshape(-1)

    assert torch.equal(in_memory_order(flat(source), x.shape, source, target), flat(target))


# -- what cannot be served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(table: Any) -> None:
    module = nn.ModuleDict({"tokens": table(10, 4, sparse=True), "head": nn.Linear(4, 10)})
    with pytest.raises(ValueError, match=r"tokens is an Embedding.* with sparse=True.* make it with sparse=False"):
        refuse_sparse_gradients(module)
    module["tokens"].requires_grad_(False)
    refuse_sparse_gradients(module)
